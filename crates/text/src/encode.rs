//! Text to token ids, fast where it is proven and slow where it is not.

use serde_json::Value;
use tokenizers::Tokenizer;

use crate::model::TextError;

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

/// Which added tokens an encoding knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Added {
    /// All of them, as in a rendered template.
    All,
    /// None: everything is text.
    None,
}

/// A tokenizer with its oracle.
pub(crate) struct Encoder {
    fast: Option<Box<fastokens::Tokenizer>>,
    all: Tokenizer,
    /// The same with all added tokens marked special and encoded as text.
    none: Tokenizer,
}

impl Encoder {
    pub(crate) fn new(json: &Value) -> Result<Self, TextError> {
        let all = load(json)?;
        let mut without = json.clone();
        for token in without.get_mut("added_tokens").and_then(Value::as_array_mut).into_iter().flatten() {
            token["special"] = Value::Bool(true);
        }
        let mut none = load(&without)?;
        none.set_encode_special_tokens(true);
        let mut encoder = Self { fast: None, all, none };
        if let Ok(fast) = fastokens::Tokenizer::from_json(json.clone()) {
            let fast = Box::new(fast);
            let agrees = CORPUS.iter().all(|text| {
                [Added::All, Added::None].into_iter().all(|added| {
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
            Added::None => &self.none,
        };
        let encoding = tokenizer.encode_fast(text, false).map_err(|error| TextError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}

fn encode_fast(fast: &fastokens::Tokenizer, text: &str, added: Added) -> Option<Vec<u32>> {
    let policy = match added {
        Added::All => fastokens::AddedTokenPolicy::All,
        Added::None => fastokens::AddedTokenPolicy::None,
    };
    fast.encode_with_policy(text, false, policy).ok()
}

fn load(json: &Value) -> Result<Tokenizer, TextError> {
    let bytes = serde_json::to_vec(json).map_err(|error| TextError::Tokenizer(error.to_string()))?;
    Tokenizer::from_bytes(bytes).map_err(|error| TextError::Tokenizer(error.to_string()))
}
