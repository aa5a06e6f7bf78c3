//! The hash of a block, and what it starts from.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Seed of all block hashes of one cluster. Another seed in another cluster keeps prefixes from being compared across.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HashSeed(pub u64);

/// Content hash of a block and of everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub u64);

/// What separates caches that may not share blocks: pool namespace, LoRA adapter, and salt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Namespace {
    encoded: Vec<u8>,
}

impl Namespace {
    /// A namespace from the pool's own text, an adapter's name and a salt; the last two may be empty.
    ///
    /// Parts are length-prefixed, so that no two different triples encode alike.
    #[must_use]
    pub fn new(pool: &str, adapter: &str, cache_salt: &str) -> Self {
        let mut encoded = Vec::with_capacity(24 + pool.len() + adapter.len() + cache_salt.len());
        for part in [pool, adapter, cache_salt] {
            encoded.extend_from_slice(&(part.len() as u64).to_le_bytes());
            encoded.extend_from_slice(part.as_bytes());
        }
        Self { encoded }
    }

    /// The parent of every first block of this namespace. It is no block and is never stored.
    #[must_use]
    pub fn root(&self, seed: HashSeed) -> BlockHash {
        BlockHash(xxh3_64_with_seed(&self.encoded, seed.0))
    }
}

/// Hashes of the whole blocks of a prompt, in order. A last block that is not full has none.
///
/// A block size of zero gives no blocks.
#[must_use]
pub fn block_hashes(root: BlockHash, tokens: &[u32], block_size_tokens: usize) -> Vec<BlockHash> {
    let mut hasher = BlockHasher::new(root, block_size_tokens);
    let mut hashes = Vec::with_capacity(tokens.len().checked_div(block_size_tokens).unwrap_or(0));
    hasher.push(tokens, &mut hashes);
    hashes
}

/// Blocks of a prompt that a cache can serve: an engine must compute at least the last token, so a hit never covers it.
#[must_use]
pub fn usable_blocks(prompt_tokens: usize, block_size_tokens: usize) -> usize {
    prompt_tokens.saturating_sub(1).checked_div(block_size_tokens).unwrap_or(0)
}

/// Hashes blocks as their tokens arrive.
///
/// The hash of a block is XXH3-64 of its parent's hash and of the XXH3-64 of its tokens, each in little-endian bytes. The
/// tokens are hashed without the parent, so that a processor works on several blocks at once; only the short second hash
/// waits for the block before.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    parent: BlockHash,
    block_size_tokens: usize,
    /// Tokens of the open block, as they are hashed.
    buffer: Vec<u8>,
}

impl BlockHasher {
    /// A hasher whose first block follows `parent`: a namespace's root, or an earlier block.
    #[must_use]
    pub fn new(parent: BlockHash, block_size_tokens: usize) -> Self {
        Self { parent, block_size_tokens, buffer: Vec::with_capacity(4 * block_size_tokens) }
    }

    /// Hash of the last whole block, or what the hasher started from.
    #[must_use]
    pub fn parent(&self) -> BlockHash {
        self.parent
    }

    /// Tokens of the block that is not full yet.
    #[must_use]
    pub fn open_tokens(&self) -> usize {
        self.buffer.len() / 4
    }

    /// Takes tokens and appends the hash of each block that became full.
    pub fn push(&mut self, tokens: &[u32], hashes: &mut Vec<BlockHash>) {
        if self.block_size_tokens == 0 {
            return;
        }
        let mut rest = tokens;
        if self.open_tokens() > 0 {
            let missing = self.block_size_tokens - self.open_tokens();
            let (now, later) = rest.split_at(missing.min(rest.len()));
            self.buffer.extend(now.iter().flat_map(|token| token.to_le_bytes()));
            rest = later;
            if self.open_tokens() < self.block_size_tokens {
                return;
            }
            self.parent = block_hash(self.parent, &self.buffer);
            hashes.push(self.parent);
        }
        let whole = rest.chunks_exact(self.block_size_tokens);
        let open = whole.remainder();
        self.buffer.resize(4 * self.block_size_tokens, 0);
        for block in whole {
            let (bytes, _) = self.buffer.as_chunks_mut::<4>();
            bytes.iter_mut().zip(block).for_each(|(bytes, token)| *bytes = token.to_le_bytes());
            self.parent = block_hash(self.parent, &self.buffer);
            hashes.push(self.parent);
        }
        self.buffer.clear();
        self.buffer.extend(open.iter().flat_map(|token| token.to_le_bytes()));
    }
}

/// The seed of the cluster went into the root, so none is needed here.
fn block_hash(parent: BlockHash, tokens: &[u8]) -> BlockHash {
    let mut both = [0; 16];
    both[..8].copy_from_slice(&parent.0.to_le_bytes());
    both[8..].copy_from_slice(&xxh3_64(tokens).to_le_bytes());
    BlockHash(xxh3_64(&both))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn root() -> BlockHash {
        Namespace::new("model", "", "").root(HashSeed(7))
    }

    #[test]
    fn an_engine_always_computes_the_last_token() {
        assert_eq!([0, 0, 0, 0, 1, 1], [0, 1, 31, 32, 33, 64].map(|tokens| usable_blocks(tokens, 32)));
        assert_eq!(0, usable_blocks(100, 0));
    }

    #[test]
    fn namespaces_that_differ_in_one_part_share_nothing() {
        let roots: std::collections::HashSet<_> = [
            Namespace::new("a", "", ""),
            Namespace::new("", "a", ""),
            Namespace::new("", "", "a"),
            Namespace::new("ab", "", ""),
            Namespace::new("a", "b", ""),
        ]
        .iter()
        .flat_map(|namespace| [namespace.root(HashSeed(1)), namespace.root(HashSeed(2))])
        .collect();
        assert_eq!(10, roots.len());
    }

    #[test]
    fn hashes_are_the_same_on_every_machine_and_in_every_version() {
        let root = Namespace::new("model", "adapter", "salt").root(HashSeed(7));
        let hashes = block_hashes(root, &[1, 2, 3, 0x0102_0304, u32::MAX], 2);
        // Computed with the reference implementation of XXH3.
        let expected = [3_499_718_980_176_908_736, 2_651_487_804_123_099_898].map(BlockHash);
        assert_eq!((BlockHash(359_960_380_610_927_242), expected.to_vec()), (root, hashes));
    }

    proptest! {
        #[test]
        fn equal_hashes_mean_equal_prefixes(
            tokens in prop::collection::vec(0u32..4, 0..64),
            other in prop::collection::vec(0u32..4, 0..64),
            block in 1usize..9,
        ) {
            let (left, right) = (block_hashes(root(), &tokens, block), block_hashes(root(), &other, block));
            for position in 0..left.len().min(right.len()) {
                let end = (position + 1) * block;
                prop_assert_eq!(tokens[..end] == other[..end], left[position] == right[position]);
            }
        }

        #[test]
        fn hashing_in_pieces_equals_hashing_at_once(
            tokens in prop::collection::vec(any::<u32>(), 0..200),
            cuts in prop::collection::vec(0usize..200, 0..8),
            block in 1usize..33,
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(tokens.len())).collect();
            cuts.extend([0, tokens.len()]);
            cuts.sort_unstable();
            let mut hasher = BlockHasher::new(root(), block);
            let mut pieces = Vec::new();
            for pair in cuts.windows(2) {
                hasher.push(&tokens[pair[0]..pair[1]], &mut pieces);
            }
            prop_assert_eq!(block_hashes(root(), &tokens, block), pieces);
            prop_assert_eq!(tokens.len() % block, hasher.open_tokens());
        }
    }
}
