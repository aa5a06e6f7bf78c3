//! Which servers outside the mesh a router may send requests to.

use std::{collections::BTreeMap, path::PathBuf};

use kvist_errors::{Code, KvistError};
use serde::Deserialize;

/// One OpenAI-compatible server that is no part of the mesh: a provider, or a stock server.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct UpstreamSettings {
    /// Its name in metrics and logs.
    pub name: String,
    /// Where its API begins, such as `https://api.example.com/v1`.
    pub url: String,
    /// The models that it serves: by the name that clients say, the name that it knows.
    pub models: BTreeMap<String, String>,
    /// File with its key, which is sent as a bearer; read anew for each connection attempt that needs it. None for
    /// servers that ask for none.
    #[serde(default)]
    pub api_key_file: Option<PathBuf>,
    /// Authorities that sign its certificate, as PEM; without it the system's.
    #[serde(default)]
    pub tls_ca_file: Option<PathBuf>,
    /// Time for connecting and for the head of its answer.
    #[serde(default = "default_connect_timeout_ms")]
    pub connect_timeout_ms: u64,
}

fn default_connect_timeout_ms() -> u64 {
    30_000
}

impl UpstreamSettings {
    /// Sees to it that a list makes sense.
    ///
    /// # Errors
    /// Which field does not, and why.
    pub fn check(list: &[Self]) -> Result<(), KvistError> {
        for (position, upstream) in list.iter().enumerate() {
            let wrong = |field: &str, why: &str| {
                Err(KvistError::field(Code::InvalidArgument, format!("upstreams[{position}].{field}"), why))
            };
            let is_name = !upstream.name.is_empty()
                && upstream.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
            if !is_name {
                return wrong("name", "must be letters, digits, '-', '_' and '.'");
            }
            if list.iter().take(position).any(|other| other.name == upstream.name) {
                return wrong("name", "is that of another upstream");
            }
            if !upstream.url.starts_with("https://") && !upstream.url.starts_with("http://") {
                return wrong("url", "must begin with https:// or http://");
            }
            if upstream.url.contains(['?', '#', '@']) {
                return wrong("url", "must have no query and no credentials");
            }
            if upstream.models.is_empty()
                || upstream.models.iter().any(|(name, known)| name.is_empty() || known.is_empty())
            {
                return wrong("models", "must name at least one model");
            }
            if upstream.connect_timeout_ms == 0 {
                return wrong("connect_timeout_ms", "must be above 0");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<(), KvistError> {
        UpstreamSettings::check(&serde_json::from_str::<Vec<UpstreamSettings>>(json).unwrap())
    }

    #[test]
    fn a_wrong_upstream_is_named_by_its_field() {
        assert_eq!(Ok(()), read(r#"[{"name":"a","url":"https://x/v1","models":{"m":"remote"}}]"#));
        for (json, field) in [
            (r#"[{"name":"a b","url":"https://x","models":{"m":"m"}}]"#, "upstreams[0].name"),
            (r#"[{"name":"a","url":"ftp://x","models":{"m":"m"}}]"#, "upstreams[0].url"),
            (r#"[{"name":"a","url":"https://u:p@x","models":{"m":"m"}}]"#, "upstreams[0].url"),
            (r#"[{"name":"a","url":"https://x","models":{}}]"#, "upstreams[0].models"),
            (r#"[{"name":"a","url":"https://x","models":{"m":"m"},"connect_timeout_ms":0}]"#, "upstreams[0].connect"),
            (
                r#"[{"name":"a","url":"https://x","models":{"m":"m"}},{"name":"a","url":"https://y","models":{"m":"m"}}]"#,
                "upstreams[1].name",
            ),
        ] {
            assert!(read(json).unwrap_err().message.starts_with(field), "{json}");
        }
    }
}
