//! Errors as gRPC statuses and back.

use std::collections::HashMap;

use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::{Code, FieldViolation, KvistError};

/// `google.rpc.ErrorInfo.domain` of all errors.
pub const DOMAIN: &str = "kvist.dev";

/// Metadata key that says that nothing was started.
const NOT_STARTED: &str = "not_started";

impl From<KvistError> for Status {
    fn from(error: KvistError) -> Self {
        let mut metadata = HashMap::new();
        if error.not_started {
            metadata.insert(NOT_STARTED.to_owned(), "true".to_owned());
        }
        let mut details = ErrorDetails::new();
        details.set_error_info(error.code.name(), DOMAIN, metadata);
        for violation in &error.fields {
            details.add_bad_request_violation(&violation.field, &violation.description);
        }
        if let Some(retry_after) = error.retry_after {
            details.set_retry_info(Some(retry_after));
        }
        Self::with_error_details(error.code.grpc(), error.message, details)
    }
}

/// Reads an error from a status. A status of another origin gets the nearest code.
#[must_use]
pub fn from_status(status: &Status) -> KvistError {
    let details = status.get_error_details();
    let info = details.error_info().filter(|info| info.domain == DOMAIN);
    let code = info.and_then(|info| Code::from_name(&info.reason)).unwrap_or_else(|| nearest(status.code()));
    let mut error = KvistError::new(code, status.message());
    error.not_started = info.is_some_and(|info| info.metadata.contains_key(NOT_STARTED));
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
        tonic::Code::Unauthenticated | tonic::Code::PermissionDenied => Code::InvalidApiKey,
        tonic::Code::NotFound => Code::NotFound,
        tonic::Code::AlreadyExists => Code::AlreadyExists,
        tonic::Code::Aborted => Code::Conflict,
        tonic::Code::FailedPrecondition => Code::PoolRevisionMismatch,
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
                .before_start();
            assert_eq!(error, from_status(&Status::from(error.clone())));
        }
    }

    #[test]
    fn a_foreign_status_gets_the_nearest_code() {
        assert_eq!(Code::EngineUnavailable, from_status(&Status::unavailable("gone")).code);
        assert_eq!(Code::Internal, from_status(&Status::unknown("?")).code);
    }
}
