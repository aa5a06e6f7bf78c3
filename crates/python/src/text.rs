//! Tokenizer and chat template of a model, for tests and tools.

use std::time::{SystemTime, UNIX_EPOCH};

use kvist_errors::{Code, KvistError};
use kvist_text::{Chat, TextError, TextHeader};
use pyo3::prelude::*;

use crate::failure::{raise, raise_invalid};

/// One model's text.
#[pyclass(frozen, module = "kvist._core")]
pub(crate) struct ModelText {
    inner: kvist_text::ModelText,
}

#[pymethods]
impl ModelText {
    /// Reads a `tokenizer.json`.
    #[new]
    #[pyo3(signature = (tokenizer_json, *, chat_template="", bos_token="", eos_token="", add_bos=false, eos_token_ids=Vec::new()))]
    fn new(
        py: Python<'_>,
        tokenizer_json: &[u8],
        chat_template: &str,
        bos_token: &str,
        eos_token: &str,
        add_bos: bool,
        eos_token_ids: Vec<u32>,
    ) -> PyResult<Self> {
        let header = TextHeader {
            chat_template: chat_template.to_owned(),
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
            add_bos,
            eos_token_ids,
        };
        // Loading takes seconds for a large vocabulary.
        let inner = py.detach(|| kvist_text::ModelText::load(tokenizer_json, header)).map_err(refused)?;
        Ok(Self { inner })
    }

    /// BLAKE3 of the tokenizer file.
    #[getter]
    fn digest(&self) -> &str {
        self.inner.digest()
    }

    /// Whether the fast tokenizer agreed with its oracle.
    #[getter]
    fn is_fast(&self) -> bool {
        self.inner.is_fast()
    }

    /// Tokens of the vocabulary.
    #[getter]
    fn vocabulary_size(&self) -> usize {
        self.inner.vocabulary_size()
    }

    /// Token ids of a plain prompt.
    fn encode(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
        py.detach(|| self.inner.encode_prompt(text)).map_err(refused)
    }

    /// Text of token ids.
    #[pyo3(signature = (token_ids, *, skip_special=true))]
    fn decode(&self, py: Python<'_>, token_ids: Vec<u32>, skip_special: bool) -> String {
        py.detach(|| self.inner.decode(&token_ids, skip_special))
    }

    /// Text of a conversation; messages and tools as JSON arrays, variables as a JSON object.
    #[pyo3(signature = (messages_json, *, tools_json="[]", variables_json="{}", add_generation_prompt=true))]
    fn render_chat(
        &self,
        py: Python<'_>,
        messages_json: &str,
        tools_json: &str,
        variables_json: &str,
        add_generation_prompt: bool,
    ) -> PyResult<String> {
        let chat = chat(messages_json, tools_json, variables_json, add_generation_prompt)?;
        py.detach(|| self.inner.render_chat(&chat)).map_err(refused)
    }

    /// Token ids of a conversation.
    #[pyo3(signature = (messages_json, *, tools_json="[]", variables_json="{}", add_generation_prompt=true))]
    fn encode_chat(
        &self,
        py: Python<'_>,
        messages_json: &str,
        tools_json: &str,
        variables_json: &str,
        add_generation_prompt: bool,
    ) -> PyResult<Vec<u32>> {
        let chat = chat(messages_json, tools_json, variables_json, add_generation_prompt)?;
        py.detach(|| self.inner.encode_chat(&chat, "")).map_err(refused)
    }
}

fn chat(messages_json: &str, tools_json: &str, variables_json: &str, add_generation_prompt: bool) -> PyResult<Chat> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Chat {
        messages: serde_json::from_str(messages_json).map_err(|error| raise_invalid("messages_json", error))?,
        tools: serde_json::from_str(tools_json).map_err(|error| raise_invalid("tools_json", error))?,
        variables: serde_json::from_str(variables_json).map_err(|error| raise_invalid("variables_json", error))?,
        add_generation_prompt,
        now_unix_seconds: i64::try_from(now.as_secs()).unwrap_or(i64::MAX),
    })
}

fn refused(error: TextError) -> PyErr {
    let code = match error {
        TextError::Render(_) | TextError::NoTemplate => Code::TemplateFailed,
        _ => Code::InvalidArgument,
    };
    raise(&KvistError::new(code, error.to_string()))
}
