//! Token ids to bytes.

use std::collections::{HashMap, HashSet};

use tokenizers::Tokenizer;

/// The bytes of each token, in one run of memory.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    bytes: Vec<u8>,
    /// Start of each token's bytes; one more than there are tokens.
    starts: Vec<u32>,
    special: HashSet<u32>,
    /// Sentencepiece models mark a word's start with a space that the text does not begin with.
    strips_first_space: bool,
}

impl Vocabulary {
    pub(crate) fn new(tokenizer: &Tokenizer, decoder: &serde_json::Value) -> Self {
        let byte_level = mentions(decoder, "ByteLevel");
        let added = tokenizer.get_added_tokens_decoder();
        let mut tokens: HashMap<u32, String> =
            tokenizer.get_vocab(false).into_iter().map(|(token, id)| (id, token)).collect();
        tokens.retain(|id, _| !added.contains_key(id));
        let size = tokens.keys().chain(added.keys()).max().map_or(0, |last| last + 1);
        let alphabet = byte_alphabet();
        let (mut bytes, mut starts) = (Vec::new(), vec![0]);
        for id in 0..size {
            if let Some(token) = added.get(&id) {
                bytes.extend_from_slice(token.content.as_bytes());
            } else if let Some(token) = tokens.get(&id) {
                push_token(token, byte_level, &alphabet, &mut bytes);
            }
            starts.push(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        }
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        Self { bytes, starts, special, strips_first_space: !byte_level && mentions(decoder, "Strip") }
    }

    /// Bytes of a token; none for an id that the vocabulary lacks.
    pub(crate) fn bytes_of(&self, id: u32) -> &[u8] {
        let position = id as usize;
        let (Some(start), Some(end)) = (self.starts.get(position), self.starts.get(position + 1)) else { return &[] };
        &self.bytes[*start as usize..*end as usize]
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
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
        // A character outside the alphabet stands for itself.
        let mut buffer = [0; 4];
        for character in token.chars() {
            match alphabet.get(&character) {
                Some(byte) => bytes.push(*byte),
                None => bytes.extend_from_slice(character.encode_utf8(&mut buffer).as_bytes()),
            }
        }
    } else if let Some(byte) = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')) {
        match u8::from_str_radix(byte, 16) {
            Ok(byte) => bytes.push(byte),
            Err(_) => bytes.extend_from_slice(token.as_bytes()),
        }
    } else {
        bytes.extend_from_slice(token.replace('\u{2581}', " ").as_bytes());
    }
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

fn mentions(decoder: &serde_json::Value, kind: &str) -> bool {
    match decoder {
        serde_json::Value::Object(map) => {
            map.get("type").and_then(|value| value.as_str()) == Some(kind)
                || map.values().any(|value| mentions(value, kind))
        }
        serde_json::Value::Array(list) => list.iter().any(|value| mentions(value, kind)),
        _ => false,
    }
}
