//! Recomputing vLLM's own block hashes, where they are reproducible.
//!
//! A hash is SHA-256 over the digest of the block before, the block's tokens and its further keys, as canonical CBOR or
//! as a pickle; events carry the last eight bytes of it. So a digest is known only of blocks that were recomputed
//! themselves, from the beginning of a prompt on, and some of them are remembered.

use std::collections::VecDeque;

use hashbrown::HashMap;
use ring::digest::{SHA256, digest};

use crate::EngineHash;

/// Blocks recomputed of one batch; an engine publishes one batch a step.
const MOST_BLOCKS_A_BATCH: usize = 32;
/// Digests remembered for the blocks that follow.
const MOST_DIGESTS: usize = 1 << 14;
/// What vLLM hashes as the parent of first blocks when `PYTHONHASHSEED` is not set.
const UNSEEDED: &str = "vllm-none-hash";
/// Pickles larger than that are split into frames.
const MOST_FRAME_BYTES: usize = 64 << 10;

/// `--prefix-caching-hash-algo`, as far as its hashes can be reproduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashAlgorithm {
    /// SHA-256 of canonical CBOR.
    Sha256Cbor,
    /// SHA-256 of a pickle. Reproduced for blocks without further keys alone: how a pickle refers to texts that came
    /// before depends on the identity of Python objects.
    Sha256,
}

/// How an engine names its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashScheme {
    /// The algorithm.
    pub algorithm: HashAlgorithm,
    /// The engine's `PYTHONHASHSEED`; none when it has none.
    pub seed: Option<String>,
}

type Sha256Digest = [u8; 32];

/// A run of blocks as an event states it.
pub(super) struct StatedRun<'a> {
    pub(super) hashes: &'a [EngineHash],
    pub(super) parent: Option<EngineHash>,
    pub(super) tokens: &'a [u32],
    pub(super) block_size_tokens: usize,
    /// The salt of the prompt, when the first block starts one; empty without.
    pub(super) salt: &'a str,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checked {
    pub(super) verified: u64,
    pub(super) mismatched: u64,
}

/// Recomputes a paced sample of an engine's hashes.
#[derive(Debug)]
pub(super) struct HashVerifier {
    algorithm: HashAlgorithm,
    none_hash: Sha256Digest,
    digests: HashMap<EngineHash, Sha256Digest>,
    order: VecDeque<EngineHash>,
    left_in_batch: usize,
}

impl HashVerifier {
    pub(super) fn new(scheme: &HashScheme) -> Self {
        let seed = scheme.seed.as_deref().unwrap_or(UNSEEDED);
        let none_hash = match scheme.algorithm {
            HashAlgorithm::Sha256Cbor => sha256(&cbor_text(seed)),
            HashAlgorithm::Sha256 => sha256(&pickled_text(seed)),
        };
        Self {
            algorithm: scheme.algorithm,
            none_hash,
            digests: HashMap::new(),
            order: VecDeque::new(),
            left_in_batch: MOST_BLOCKS_A_BATCH,
        }
    }

    /// Another batch may be sampled.
    pub(super) fn next_batch(&mut self) {
        self.left_in_batch = MOST_BLOCKS_A_BATCH;
    }

    /// Recomputes what it can of a run without images, embeddings or adapter. Behind a block whose hash is another one
    /// nothing is known.
    pub(super) fn check(&mut self, run: &StatedRun<'_>) -> Checked {
        let mut checked = Checked::default();
        let size = run.block_size_tokens;
        if size == 0 || run.tokens.len() != run.hashes.len().saturating_mul(size) {
            return checked;
        }
        let mut salt = run.salt;
        let parent = match run.parent {
            None => Some(self.none_hash),
            Some(parent) => self.digests.get(&parent).copied(),
        };
        let Some(mut parent) = parent else { return checked };
        for (stated, tokens) in run.hashes.iter().zip(run.tokens.chunks_exact(size)) {
            if self.left_in_batch == 0 {
                return checked;
            }
            let Some(bytes) = self.encoded(&parent, tokens, std::mem::take(&mut salt)) else { return checked };
            self.left_in_batch -= 1;
            let digest = sha256(&bytes);
            if last_bytes(&digest) != *stated {
                checked.mismatched += 1;
                return checked;
            }
            checked.verified += 1;
            self.remember(*stated, digest);
            parent = digest;
        }
        checked
    }

    fn encoded(&self, parent: &Sha256Digest, tokens: &[u32], salt: &str) -> Option<Vec<u8>> {
        match self.algorithm {
            HashAlgorithm::Sha256Cbor => Some(cbor(parent, tokens, salt)),
            HashAlgorithm::Sha256 if salt.is_empty() => pickle(parent, tokens),
            HashAlgorithm::Sha256 => None,
        }
    }

    fn remember(&mut self, hash: EngineHash, digest: Sha256Digest) {
        if self.digests.insert(hash, digest).is_some() {
            return;
        }
        self.order.push_back(hash);
        if self.order.len() > MOST_DIGESTS
            && let Some(oldest) = self.order.pop_front()
        {
            self.digests.remove(&oldest);
        }
    }
}

fn sha256(bytes: &[u8]) -> Sha256Digest {
    let mut out = [0; 32];
    out.copy_from_slice(digest(&SHA256, bytes).as_ref());
    out
}

fn last_bytes(digest: &Sha256Digest) -> EngineHash {
    let [.., a, b, c, d, e, f, g, h] = *digest;
    EngineHash(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
}

/// The head of a CBOR item: its kind and a number, in the shortest form.
fn cbor_head(kind: u8, number: u64, out: &mut Vec<u8>) {
    let kind = kind << 5;
    let bytes = number.to_be_bytes();
    match number {
        0..24 => out.push(kind | bytes[7]),
        24..0x100 => out.extend([kind | 24, bytes[7]]),
        0x100..0x1_0000 => {
            out.push(kind | 25);
            out.extend(&bytes[6..]);
        }
        0x1_0000..0x1_0000_0000 => {
            out.push(kind | 26);
            out.extend(&bytes[4..]);
        }
        _ => {
            out.push(kind | 27);
            out.extend(bytes);
        }
    }
}

fn cbor_text(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(9 + text.len());
    cbor_head(3, text.len() as u64, &mut out);
    out.extend(text.as_bytes());
    out
}

/// `[parent, [token…], null]`, or with `[["cache_salt", salt]]` at its end.
fn cbor(parent: &Sha256Digest, tokens: &[u32], salt: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(48 + 5 * tokens.len() + salt.len());
    cbor_head(4, 3, &mut out);
    cbor_head(2, parent.len() as u64, &mut out);
    out.extend(parent);
    cbor_head(4, tokens.len() as u64, &mut out);
    tokens.iter().for_each(|token| cbor_head(0, u64::from(*token), &mut out));
    if salt.is_empty() {
        out.push(0xf6);
    } else {
        cbor_head(4, 1, &mut out);
        cbor_head(4, 2, &mut out);
        out.extend(cbor_text("cache_salt"));
        out.extend(cbor_text(salt));
    }
    out
}

/// A pickle of protocol 5 with one frame.
fn framed(body: &[u8]) -> Vec<u8> {
    let mut out = vec![0x80, 5, 0x95];
    out.extend((body.len() as u64).to_le_bytes());
    out.extend(body);
    out
}

fn pickled_text(text: &str) -> Vec<u8> {
    let mut body = Vec::with_capacity(8 + text.len());
    match u8::try_from(text.len()) {
        Ok(length) => body.extend([0x8c, length]),
        Err(_) => {
            body.push(b'X');
            body.extend(u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
        }
    }
    body.extend(text.as_bytes());
    body.extend([0x94, b'.']);
    framed(&body)
}

/// `(parent, (token…), None)`; none where Python would write it otherwise.
fn pickle(parent: &Sha256Digest, tokens: &[u32]) -> Option<Vec<u8>> {
    let mut body = vec![b'C', 32];
    body.extend(parent);
    body.push(0x94);
    if tokens.len() > 3 {
        body.push(b'(');
    }
    for token in tokens {
        let token = i32::try_from(*token).ok()?;
        match token {
            0..0x100 => body.extend([b'K', token.to_le_bytes()[0]]),
            0x100..0x1_0000 => {
                body.push(b'M');
                body.extend(&token.to_le_bytes()[..2]);
            }
            _ => {
                body.push(b'J');
                body.extend(token.to_le_bytes());
            }
        }
    }
    body.push(match tokens.len() {
        0 => return None,
        1 => 0x85,
        2 => 0x86,
        3 => 0x87,
        _ => b't',
    });
    body.extend([0x94, b'N', 0x87, 0x94, b'.']);
    (body.len() < MOST_FRAME_BYTES).then(|| framed(&body))
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
