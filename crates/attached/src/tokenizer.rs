//! The tokenizer of the model, from a folder in the form of Hugging Face, and whether it is the server's.

use std::path::Path;

use kvist_errors::KvistError;
use kvist_text::{ModelText, TextHeader};
use kvist_worker::TokenizerFile;
use serde_json::{Value, json};

use crate::{client::Client, settings::wrong};

/// Texts that the folder's tokenizer and the server's must encode alike.
const PROBES: [&str; 3] = [
    "The capital of France is Paris.\n\n\t It's 1234567890 km away, isn't it?",
    "naïve café — “quotes” … 日本語と中文 Привет 👩‍👩‍👧‍👦",
    "fn main() { let x: Vec<u32> = (0..10).map(|i| i * 2).collect(); }  <|im_start|>",
];

/// A tokenizer that was read.
#[derive(Debug)]
pub(crate) struct Tokenizer {
    pub(crate) file: TokenizerFile,
    text: ModelText,
}

impl Tokenizer {
    /// Reads a folder.
    ///
    /// # Errors
    /// There is no `tokenizer.json`, or it cannot be used.
    pub(crate) fn read(folder: &Path) -> Result<Self, KvistError> {
        let missing = |error| wrong("tokenizer", format!("tokenizer.json cannot be read: {error}"));
        let json = std::fs::read(folder.join("tokenizer.json")).map_err(missing)?;
        let optional = |name: &str| -> Value {
            let bytes = std::fs::read(folder.join(name)).unwrap_or_default();
            serde_json::from_slice(&bytes).unwrap_or(Value::Null)
        };
        let (config, generation, model) =
            (optional("tokenizer_config.json"), optional("generation_config.json"), optional("config.json"));
        let chat_template = std::fs::read_to_string(folder.join("chat_template.jinja"))
            .ok()
            .or_else(|| template(&config["chat_template"]))
            .unwrap_or_default();
        let header = TextHeader {
            chat_template,
            bos_token: token(&config["bos_token"]),
            eos_token: token(&config["eos_token"]),
            ..TextHeader::default()
        };
        let unusable = |error: kvist_text::TextError| wrong("tokenizer", error.to_string());
        let text = ModelText::load(&json, header).map_err(unusable)?;
        let header = text.header();
        let mut eos_token_ids = ids(&generation["eos_token_id"]);
        if eos_token_ids.is_empty() {
            eos_token_ids = ids(&model["eos_token_id"]);
        }
        if let Ok([own]) = text.encode(&header.eos_token, false).as_deref()
            && !eos_token_ids.contains(own)
        {
            eos_token_ids.push(*own);
        }
        let file = TokenizerFile {
            json: json.into(),
            chat_template: header.chat_template.clone(),
            bos_token: header.bos_token.clone(),
            eos_token: header.eos_token.clone(),
            add_bos: false,
            eos_token_ids,
        };
        Ok(Self { file, text })
    }

    /// Token ids of a text, as plain prompts have them.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>, KvistError> {
        self.text.encode(text, false).map_err(|error| wrong("tokenizer", error.to_string()))
    }

    /// Compares this tokenizer with the server's, and learns from it whether plain prompts get a beginning token.
    /// False when the server has no tokenizer to compare with.
    ///
    /// # Errors
    /// They are not the same, or nobody answers.
    pub(crate) async fn compare(&mut self, client: &Client, model: &str) -> Result<bool, KvistError> {
        let bos = self.encode(&self.file.bos_token.clone())?;
        for probe in PROBES {
            let asked = json!({"model": model, "prompt": probe, "add_special_tokens": true});
            let reply = client.ask("/tokenize", http::HeaderMap::new(), &asked).await?;
            let Some(theirs) = reply.good_json().map(|reply| ids(&reply["tokens"])) else { return Ok(false) };
            let ours = self.encode(probe)?;
            let begins = bos.len() == 1 && theirs.first() == bos.first() && ours.first() != bos.first();
            if begins {
                self.file.add_bos = true;
            }
            if theirs[usize::from(begins)..] != ours[..] {
                let why = format!(
                    "is not the server's: it makes {} tokens of a text and the server other {}",
                    ours.len(),
                    theirs.len()
                );
                return Err(wrong("tokenizer", why));
            }
        }
        Ok(true)
    }
}

fn token(value: &Value) -> String {
    value.as_str().or_else(|| value["content"].as_str()).unwrap_or_default().to_owned()
}

/// The template, or that of the name `default` where there are several.
fn template(value: &Value) -> Option<String> {
    let named = || value.as_array()?.iter().find(|one| one["name"] == "default")?["template"].as_str();
    value.as_str().or_else(named).map(str::to_owned)
}

fn ids(value: &Value) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(values) => values.iter().filter_map(id).collect(),
        value => id(value).into_iter().collect(),
    }
}
