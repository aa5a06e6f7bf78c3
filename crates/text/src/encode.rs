//! Text to token ids, fast where it is proven and slow where it is not.

use std::collections::HashSet;

use serde_json::Value;
use tokenizers::Tokenizer;

use crate::{control::AddedToken, model::TextError};

/// Texts that both tokenizers must encode alike before the fast one is used.
const CORPUS: [&str; 12] = [
    "",
    " ",
    "Hello, world!",
    "The capital of France is Paris.\n\n\t It's 1234567890 km away, isn't it?",
    "  leading and trailing   spaces  \r\n\r\n",
    "fn main() { let x: Vec<u32> = (0..10).map(|i| i * 2).collect(); }",
    "naïve café — “quotes” … ½ ﬁ Å",
    "日本語のテキストと中文文本，以及한국어",
    "Привет мир! مرحبا بالعالم שלום",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u{301} \u{200b}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<|im_start|>user\nhi<|im_end|></s><s>[INST]<unk><0x41>",
];

/// Added tokens of the tokenizer itself that join the corpus.
const OWN_TOKENS: usize = 64;

/// Which added tokens an encoding knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Added {
    /// All of them, as in a rendered template.
    All,
    /// Only those that do not steer the model: what looks like a control token is text.
    Harmless,
}

/// A tokenizer with its oracle.
pub(crate) struct Encoder {
    fast: Option<Box<fastokens::Tokenizer>>,
    all: Tokenizer,
    harmless: Tokenizer,
}

impl Encoder {
    pub(crate) fn new(json: &Value, added: &mut [AddedToken]) -> Result<Self, TextError> {
        // Both libraries can read tokens marked special as text, so exactly the control tokens are marked.
        let mut json = json.clone();
        let mut has_whole_words = false;
        let control: HashSet<&str> =
            added.iter().filter(|token| token.control).map(|token| token.content.as_str()).collect();
        for token in json.get_mut("added_tokens").and_then(Value::as_array_mut).into_iter().flatten() {
            let content = token.get("content").and_then(Value::as_str);
            let is_control = content.is_some_and(|content| control.contains(content));
            token["special"] = Value::Bool(is_control);
            has_whole_words |= token.get("single_word").and_then(Value::as_bool).unwrap_or(false);
        }
        let bytes = serde_json::to_vec(&json).map_err(|error| TextError::Tokenizer(error.to_string()))?;
        let load = || Tokenizer::from_bytes(&bytes).map_err(|error| TextError::Tokenizer(error.to_string()));
        let all = load()?;
        // A token that the vocabulary does not place gets the next free id, whatever the file says.
        for token in added.iter_mut() {
            token.id = all.token_to_id(&token.content).unwrap_or(token.id);
        }
        let mut harmless = load()?;
        harmless.set_encode_special_tokens(true);
        let mut encoder = Self { fast: None, all, harmless };
        // The fast tokenizer does not know tokens that match whole words alone.
        if !has_whole_words && let Ok(fast) = fastokens::Tokenizer::from_json(json) {
            let fast = Box::new(fast);
            let own: String =
                added.iter().take(OWN_TOKENS).map(|token| format!(" a{0}{0}b {0}\n", token.content)).collect();
            let agrees = CORPUS.into_iter().chain([own.as_str()]).all(|text| {
                [Added::All, Added::Harmless].into_iter().all(|added| {
                    encode_fast(&fast, text, added).is_some_and(|ids| encoder.slow(text, added).ok() == Some(ids))
                })
            });
            encoder.fast = agrees.then_some(fast);
        }
        Ok(encoder)
    }

    pub(crate) fn is_fast(&self) -> bool {
        self.fast.is_some()
    }

    pub(crate) fn oracle(&self) -> &Tokenizer {
        &self.all
    }

    /// Encodes without adding tokens of its own.
    pub(crate) fn encode(&self, text: &str, added: Added) -> Result<Vec<u32>, TextError> {
        match self.fast.as_ref().and_then(|fast| encode_fast(fast, text, added)) {
            Some(ids) => Ok(ids),
            None => self.slow(text, added),
        }
    }

    pub(crate) fn slow(&self, text: &str, added: Added) -> Result<Vec<u32>, TextError> {
        let tokenizer = match added {
            Added::All => &self.all,
            Added::Harmless => &self.harmless,
        };
        let encoding = tokenizer.encode_fast(text, false).map_err(|error| TextError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}

fn encode_fast(fast: &fastokens::Tokenizer, text: &str, added: Added) -> Option<Vec<u32>> {
    let policy = match added {
        Added::All => fastokens::AddedTokenPolicy::All,
        Added::Harmless => fastokens::AddedTokenPolicy::SkipSpecial,
    };
    fast.encode_with_policy(text, false, policy).ok()
}
