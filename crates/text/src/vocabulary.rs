//! Token ids to bytes.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::Tokenizer;

use crate::control::AddedToken;

/// Marks the begin of a word in sentencepiece vocabularies.
const WORD_START: char = '\u{2581}';

/// The bytes of each token, in one run of memory.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    bytes: Vec<u8>,
    /// Start of each token's bytes; one more than there are tokens.
    starts: Vec<u32>,
    /// Whether each token is left out when special tokens are skipped.
    special: Vec<bool>,
    /// Sentencepiece models mark a word's start with a space that the text does not begin with.
    strips_first_space: bool,
}

impl Vocabulary {
    pub(crate) fn new(tokenizer: &Tokenizer, added: &[AddedToken], decoder: &Value) -> Self {
        let byte_level = find_step(decoder, "ByteLevel").is_some();
        let added: HashMap<u32, &AddedToken> = added.iter().map(|token| (token.id, token)).collect();
        let mut tokens: HashMap<u32, String> =
            tokenizer.get_vocab(false).into_iter().map(|(token, id)| (id, token)).collect();
        tokens.retain(|id, _| !added.contains_key(id));
        let size = tokens.keys().chain(added.keys()).max().map_or(0, |last| last.saturating_add(1));
        let alphabet = byte_alphabet();
        let (mut bytes, mut starts, mut special) = (Vec::new(), vec![0], Vec::new());
        for id in 0..size {
            if let Some(token) = added.get(&id) {
                push_added(&token.content, byte_level, &mut bytes);
            } else if let Some(token) = tokens.get(&id) {
                push_token(token, byte_level, &alphabet, &mut bytes);
            }
            starts.push(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
            special.push(added.get(&id).is_some_and(|token| token.special));
        }
        Self { bytes, starts, special, strips_first_space: !byte_level && strips_first_space(decoder) }
    }

    /// Bytes of a token; none for an id that the vocabulary lacks.
    pub(crate) fn bytes_of(&self, id: u32) -> &[u8] {
        let position = id as usize;
        let (Some(start), Some(end)) = (self.starts.get(position), self.starts.get(position + 1)) else { return &[] };
        &self.bytes[*start as usize..*end as usize]
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    pub(crate) fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }

    pub(crate) fn len(&self) -> usize {
        self.starts.len() - 1
    }
}

fn push_token(token: &str, byte_level: bool, alphabet: &HashMap<char, u8>, bytes: &mut Vec<u8>) {
    if byte_level {
        // A token with a character outside the alphabet stands for itself.
        match token.chars().map(|character| alphabet.get(&character).copied()).collect::<Option<Vec<u8>>>() {
            Some(decoded) => bytes.extend(decoded),
            None => bytes.extend_from_slice(token.as_bytes()),
        }
    } else if let Some(byte) = byte_of(token) {
        bytes.push(byte);
    } else {
        bytes.extend_from_slice(token.replace(WORD_START, " ").as_bytes());
    }
}

/// Added tokens are written as they are meant, but sentencepiece's runs of spaces are among them too.
fn push_added(token: &str, byte_level: bool, bytes: &mut Vec<u8>) {
    if byte_level {
        bytes.extend_from_slice(token.as_bytes());
    } else {
        bytes.extend_from_slice(token.replace(WORD_START, " ").as_bytes());
    }
}

/// The byte of a token such as `<0x0A>`.
fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The printable character that stands for each byte in byte-level vocabularies (GPT-2's table).
fn byte_alphabet() -> HashMap<char, u8> {
    let mut next = 256u32;
    (0u8..=255)
        .map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let code = if printable {
                u32::from(byte)
            } else {
                next += 1;
                next - 1
            };
            (char::from_u32(code).unwrap_or('\u{FFFD}'), byte)
        })
        .collect()
}

/// The first step of a kind in a decoder, which may be a sequence of them.
fn find_step<'a>(decoder: &'a Value, kind: &str) -> Option<&'a Value> {
    match decoder {
        Value::Object(map) if map.get("type").and_then(Value::as_str) == Some(kind) => Some(decoder),
        Value::Object(map) => map.values().find_map(|value| find_step(value, kind)),
        Value::Array(list) => list.iter().find_map(|value| find_step(value, kind)),
        _ => None,
    }
}

/// Whether decoding drops the space that marks the first word.
fn strips_first_space(decoder: &Value) -> bool {
    if let Some(step) = find_step(decoder, "Strip") {
        return step.get("start").and_then(Value::as_u64).unwrap_or(0) > 0;
    }
    find_step(decoder, "Metaspace").is_some_and(|step| {
        let scheme = step.get("prepend_scheme").and_then(Value::as_str);
        scheme != Some("never") && step.get("add_prefix_space").and_then(Value::as_bool) != Some(false)
    })
}
