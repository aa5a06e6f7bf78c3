//! The error value that every part of Kvist returns.

use std::{collections::BTreeMap, error::Error, fmt, sync::Arc, time::Duration};

use crate::Code;

/// A wrong field and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldViolation {
    /// Path of the field as the caller wrote it, such as `messages[2].role`.
    pub field: String,
    /// What is wrong and what would be right.
    pub description: String,
}

/// An error of the catalogue. Its message is public: no prompt content, no address, no path.
///
/// Two errors are equal when a caller cannot tell them apart; the cause is for logs and never leaves the process.
#[derive(Clone, Debug, thiserror::Error)]
pub struct KvistError {
    /// Which.
    pub code: Code,
    /// What happened, for the caller.
    pub message: String,
    /// Wrong fields, for errors of the caller.
    pub fields: Vec<FieldViolation>,
    /// When to come back.
    pub retry_after: Option<Duration>,
    /// True when nothing was started, so that another target may be tried.
    pub not_started: bool,
    /// Facts for programs, such as a limit and what was asked for; public like the message.
    pub metadata: BTreeMap<String, String>,
    /// What led to it, for logs.
    #[source]
    pub cause: Option<Arc<dyn Error + Send + Sync>>,
}

impl PartialEq for KvistError {
    fn eq(&self, other: &Self) -> bool {
        self.code == other.code
            && self.message == other.message
            && self.fields == other.fields
            && self.retry_after == other.retry_after
            && self.not_started == other.not_started
            && self.metadata == other.metadata
    }
}

impl Eq for KvistError {}

impl fmt::Display for KvistError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.code.name(), self.message)
    }
}

impl KvistError {
    /// An error with a message.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            fields: Vec::new(),
            retry_after: None,
            not_started: false,
            metadata: BTreeMap::new(),
            cause: None,
        }
    }

    /// An error about one field; the message names it too.
    #[must_use]
    pub fn field(code: Code, field: impl Into<String>, description: impl Into<String>) -> Self {
        let (field, description) = (field.into(), description.into());
        let mut error = Self::new(code, format!("{field}: {description}"));
        error.fields.push(FieldViolation { field, description });
        error
    }

    /// The same with a time to come back.
    #[must_use]
    pub fn with_retry_after(mut self, retry_after: Duration) -> Self {
        self.retry_after = Some(retry_after);
        self
    }

    /// The same, saying that nothing was started.
    #[must_use]
    pub fn before_start(mut self) -> Self {
        self.not_started = true;
        self
    }

    /// The same with a fact for programs.
    #[must_use]
    pub fn with_metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    /// The same with what led to it.
    #[must_use]
    pub fn with_cause(mut self, cause: impl Error + Send + Sync + 'static) -> Self {
        self.cause = Some(Arc::new(cause));
        self
    }
}
