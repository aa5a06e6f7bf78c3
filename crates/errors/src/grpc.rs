//! Errors as gRPC statuses and back.

use std::collections::HashMap;

use tonic::{Status, metadata::MetadataMap};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::{Code, FieldViolation, KvistError};

/// `google.rpc.ErrorInfo.domain` of all errors.
pub const DOMAIN: &str = "kvist.dev";

/// Metadata key that says that nothing was started.
const NOT_STARTED: &str = "not_started";

/// Trailer that makes the retry policies of gRPC clients wait.
const PUSHBACK: &str = "grpc-retry-pushback-ms";

impl From<KvistError> for Status {
    fn from(error: KvistError) -> Self {
        let mut metadata: HashMap<String, String> = error.metadata.into_iter().collect();
        if error.not_started {
            metadata.insert(NOT_STARTED.to_owned(), "true".to_owned());
        }
        let mut details = ErrorDetails::new();
        details.set_error_info(error.code.name(), DOMAIN, metadata);
        for violation in &error.fields {
            details.add_bad_request_violation(&violation.field, &violation.description);
        }
        let mut trailers = MetadataMap::new();
        if let Some(retry_after) = error.retry_after {
            details.set_retry_info(Some(retry_after));
            if let Ok(value) = retry_after.as_millis().to_string().parse() {
                trailers.insert(PUSHBACK, value);
            }
        }
        Self::with_error_details_and_metadata(error.code.grpc(), error.message, details, trailers)
    }
}

/// Reads an error from a status. A status of another origin gets the nearest code.
#[must_use]
pub fn from_status(status: &Status) -> KvistError {
    let details = status.get_error_details();
    let info = details.error_info().filter(|info| info.domain == DOMAIN);
    let code = info.and_then(|info| Code::from_name(&info.reason)).unwrap_or_else(|| nearest(status.code()));
    let mut error = KvistError::new(code, status.message());
    if let Some(info) = info {
        error.metadata = info.metadata.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        error.not_started = error.metadata.remove(NOT_STARTED).is_some();
    }
    if let Some(bad_request) = details.bad_request() {
        error.fields = bad_request
            .field_violations
            .iter()
            .map(|violation| FieldViolation {
                field: violation.field.clone(),
                description: violation.description.clone(),
            })
            .collect();
    }
    error.retry_after = details.retry_info().and_then(|info| info.retry_delay);
    error
}

fn nearest(code: tonic::Code) -> Code {
    match code {
        tonic::Code::InvalidArgument | tonic::Code::OutOfRange => Code::InvalidArgument,
        tonic::Code::Unauthenticated => Code::InvalidApiKey,
        tonic::Code::PermissionDenied => Code::PermissionDenied,
        tonic::Code::NotFound => Code::NotFound,
        tonic::Code::AlreadyExists => Code::AlreadyExists,
        tonic::Code::Aborted => Code::Conflict,
        tonic::Code::FailedPrecondition => Code::PreconditionFailed,
        tonic::Code::ResourceExhausted => Code::Overloaded,
        tonic::Code::Cancelled => Code::Cancelled,
        tonic::Code::DeadlineExceeded => Code::DeadlineExceeded,
        tonic::Code::Unavailable => Code::EngineUnavailable,
        tonic::Code::Unimplemented => Code::NotImplemented,
        _ => Code::Internal,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_error_survives_the_way_over_grpc() {
        for code in Code::ALL {
            let error = KvistError::field(*code, "messages[0].role", "must be one of user, system")
                .with_retry_after(Duration::from_millis(1500))
                .with_metadata("limit", "16")
                .before_start();
            let status = Status::from(error.clone());
            assert_eq!(Some("1500"), status.metadata().get(PUSHBACK).and_then(|value| value.to_str().ok()));
            assert_eq!(error, from_status(&status));
        }
    }

    #[test]
    fn a_foreign_status_gets_the_nearest_code() {
        assert_eq!(Code::EngineUnavailable, from_status(&Status::unavailable("gone")).code);
        assert_eq!(Code::Internal, from_status(&Status::unknown("?")).code);
        // The nearest code means what the status meant, so the way back gives the same status.
        for number in 1..=16 {
            let status = tonic::Code::from_i32(number);
            let expected = match status {
                tonic::Code::Unknown | tonic::Code::DataLoss => tonic::Code::Internal,
                tonic::Code::OutOfRange => tonic::Code::InvalidArgument,
                other => other,
            };
            assert_eq!(expected, from_status(&Status::new(status, "")).code.grpc());
        }
    }

    #[test]
    fn the_cause_stays_in_the_process() {
        let error = KvistError::new(Code::Internal, "a fault").with_cause(std::io::Error::other("/secret/path"));
        assert!(std::error::Error::source(&error).is_some());
        let status = Status::from(error);
        assert!(!format!("{status:?}").contains("secret"));
    }
}
