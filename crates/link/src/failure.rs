//! Failures as they travel on the stream, and back.

use std::time::Duration;

use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{Failed, FieldViolation};

/// The message of an error.
#[must_use]
pub fn failed_from_error(error: &KvistError) -> Failed {
    Failed {
        code: error.code.name().to_owned(),
        message: error.message.clone(),
        not_started: error.not_started,
        retry_after: error.retry_after.and_then(|wait| prost_types::Duration::try_from(wait).ok()),
        field_violations: error
            .fields
            .iter()
            .map(|wrong| FieldViolation { field: wrong.field.clone(), description: wrong.description.clone() })
            .collect(),
    }
}

/// The error of a message. A code of another version is the engine's failure.
#[must_use]
pub fn error_from_failed(failed: &Failed) -> KvistError {
    let mut error = KvistError::new(Code::from_name(&failed.code).unwrap_or(Code::EngineFailed), &failed.message);
    error.not_started = failed.not_started;
    error.retry_after = failed.retry_after.and_then(|wait| Duration::try_from(wait).ok());
    error.fields = failed
        .field_violations
        .iter()
        .map(|wrong| kvist_errors::FieldViolation {
            field: wrong.field.clone(),
            description: wrong.description.clone(),
        })
        .collect();
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_survives_the_way_over_the_stream() {
        let error =
            KvistError::new(Code::QueueFull, "full").with_retry_after(Duration::from_millis(250)).before_start();
        assert_eq!(error, error_from_failed(&failed_from_error(&error)));
        let error = KvistError::field(Code::UnsupportedField, "sampling.choices", "one alone");
        assert_eq!(error, error_from_failed(&failed_from_error(&error)));
    }

    #[test]
    fn an_unknown_code_is_the_engines_failure() {
        let failed = Failed { code: "OF_ANOTHER_VERSION".to_owned(), ..Failed::default() };
        assert_eq!(Code::EngineFailed, error_from_failed(&failed).code);
    }
}
