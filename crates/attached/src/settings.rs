//! What a worker is told of a server that runs already.

use std::path::PathBuf;

use http::Uri;
use kvist_errors::{Code, KvistError};
use serde::Deserialize;
use serde_json::Value;

/// Which of a server's two doors for token ids is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Api {
    /// `/inference/v1/generate`: token ids in, token ids out. vLLM opens it with `--enable-scale-out`.
    Generate,
    /// `/v1/completions` with token ids as the prompt, and `return_token_ids`.
    Completions,
}

impl Api {
    /// The path that requests are posted to.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Generate => "/inference/v1/generate",
            Self::Completions => "/v1/completions",
        }
    }
}

/// In which order a server takes up what waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SchedulingPolicy {
    /// As it comes.
    Fcfs,
    /// Smaller priorities first.
    Priority,
}

/// The arguments of the engine `attached`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct AttachedSettings {
    /// Where the server is: `http://host:port` or `https://host:port`, with a path in front of the API's if it has one.
    pub url: String,
    /// Folder on the worker's node with the model's tokenizer in the form of Hugging Face.
    pub tokenizer: PathBuf,
    /// The model as the server names it; the only one that it serves when absent.
    #[serde(default)]
    pub model: Option<String>,
    /// Name of the key that the server asks for; none when absent.
    #[serde(default)]
    pub api_key: Option<String>,
    /// Which door is used; `generate` where it is open when absent.
    #[serde(default)]
    pub api: Option<Api>,
    /// Tokens a block: what the server says has to be the same. What counts where the server does not say.
    #[serde(default)]
    pub block_size: Option<u32>,
    /// Prompt and completion together; likewise.
    #[serde(default)]
    pub max_model_len: Option<u32>,
    /// Whether the server's KV events are followed: when it publishes them, if absent.
    #[serde(default)]
    pub kv_events: Option<bool>,
    /// The server's `PYTHONHASHSEED`, if it has one.
    #[serde(default)]
    pub python_hash_seed: Option<String>,
    /// The server's `--max-num-seqs`, which it does not say.
    #[serde(default = "max_num_seqs")]
    pub max_num_seqs: u32,
    /// The server's `--scheduling-policy`, which it does not say; `fcfs` when absent.
    #[serde(default)]
    pub scheduling_policy: Option<SchedulingPolicy>,
    /// Seconds for a connection to the server.
    #[serde(default = "connect_timeout_seconds")]
    pub connect_timeout_seconds: f64,
    /// Seconds of silence after which the server counts as dead.
    #[serde(default = "dead_after_seconds")]
    pub dead_after_seconds: f64,
}

fn max_num_seqs() -> u32 {
    256
}

fn connect_timeout_seconds() -> f64 {
    5.0
}

fn dead_after_seconds() -> f64 {
    10.0
}

/// Says what is wrong with an argument.
pub(crate) fn wrong(field: &str, why: impl Into<String>) -> KvistError {
    KvistError::field(Code::InvalidArgument, format!("engine_arguments.{field}"), why)
}

impl AttachedSettings {
    /// Reads and checks the arguments.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` with what is wrong.
    pub fn from_value(value: &Value) -> Result<Self, KvistError> {
        // Underscores are vLLM's other spelling.
        let value = match value {
            Value::Object(fields) => {
                Value::Object(fields.iter().map(|(name, value)| (name.replace('_', "-"), value.clone())).collect())
            }
            other => other.clone(),
        };
        let settings: Self = serde_json::from_value(value)
            .map_err(|error| KvistError::field(Code::InvalidArgument, "engine_arguments", error.to_string()))?;
        let uri: Uri = settings.url.parse().map_err(|_| wrong("url", "is no URL"))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
            return Err(wrong("url", "must be http://host:port or https://host:port"));
        }
        if uri.query().is_some() || uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(wrong("url", "must have no query and no user"));
        }
        for (field, seconds) in [
            ("connect-timeout-seconds", settings.connect_timeout_seconds),
            ("dead-after-seconds", settings.dead_after_seconds),
        ] {
            if !(0.1..=3_600.0).contains(&seconds) {
                return Err(wrong(field, "must be from 0.1 to 3600"));
            }
        }
        if settings.block_size == Some(0) || settings.max_model_len == Some(0) || settings.max_num_seqs == 0 {
            return Err(wrong("block-size, max-model-len, max-num-seqs", "must be at least 1"));
        }
        Ok(settings)
    }

    /// The address that everything is asked at, without a slash at its end.
    pub(crate) fn base(&self) -> &str {
        self.url.trim_end_matches('/')
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn arguments_have_defaults_and_both_spellings() {
        let settings = AttachedSettings::from_value(
            &json!({"url": "http://h:1/", "tokenizer": "/m", "block_size": 32, "kv-events": true, "api": null}),
        )
        .unwrap();
        assert_eq!(("http://h:1", Some(32), Some(true)), (settings.base(), settings.block_size, settings.kv_events));
        assert_eq!((None, 256), (settings.api, settings.max_num_seqs));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (wrong, expected) in [
            (json!({"tokenizer": "/m"}), "url"),
            (json!({"url": "h:1", "tokenizer": "/m"}), "engine_arguments.url"),
            (json!({"url": "ftp://h", "tokenizer": "/m"}), "engine_arguments.url"),
            (json!({"url": "http://u:p@h", "tokenizer": "/m"}), "engine_arguments.url"),
            (json!({"url": "http://h"}), "tokenizer"),
            (json!({"url": "http://h", "tokenizer": "/m", "api": "chat"}), "chat"),
            (json!({"url": "http://h", "tokenizer": "/m", "lora": 1}), "lora"),
            (json!({"url": "http://h", "tokenizer": "/m", "block-size": 0}), "block-size"),
            (json!({"url": "http://h", "tokenizer": "/m", "dead-after-seconds": 0}), "dead-after-seconds"),
        ] {
            let error = AttachedSettings::from_value(&wrong).unwrap_err();
            assert_eq!(Code::InvalidArgument, error.code);
            assert!(error.message.contains(expected), "{} lacks {expected}", error.message);
        }
    }
}
