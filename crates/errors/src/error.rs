//! The error value that every part of Kvist returns.

use std::{fmt, time::Duration};

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
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
}

impl fmt::Display for KvistError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.code.name(), self.message)
    }
}

impl KvistError {
    /// An error with a message.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), fields: Vec::new(), retry_after: None, not_started: false }
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
}
