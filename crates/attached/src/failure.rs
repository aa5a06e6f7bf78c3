//! What a server's refusals become: the one table.

use std::time::Duration;

use http::{HeaderMap, StatusCode, header};
use kvist_errors::{Code, KvistError};
use serde_json::Value;

/// Most of what a server says about an error that a client gets to read.
const LONGEST_MESSAGE: usize = 500;

/// The error that an answer of another status than 200 stands for.
pub(crate) fn refusal(status: StatusCode, headers: &HeaderMap, body: &[u8], adapter: &str) -> KvistError {
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            let retry_after = headers
                .get(header::RETRY_AFTER)
                .and_then(|value| value.to_str().ok()?.trim().parse().ok())
                .map_or(Duration::from_secs(1), Duration::from_secs);
            KvistError::new(Code::Overloaded, "the server takes no more requests at the moment")
                .with_retry_after(retry_after)
                .before_start()
        }
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            KvistError::new(Code::EngineUnavailable, "the server refuses the mesh itself").before_start()
        }
        StatusCode::NOT_FOUND if !adapter.is_empty() => {
            KvistError::new(Code::UnknownModel, "the server has no such adapter").before_start()
        }
        StatusCode::NOT_FOUND => {
            KvistError::new(Code::EngineUnavailable, "the server does not serve the model any more").before_start()
        }
        StatusCode::PAYLOAD_TOO_LARGE => {
            KvistError::new(Code::RequestTooLarge, "the request is larger than the server takes").before_start()
        }
        StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => {
            KvistError::new(Code::FirstTokenTimeout, "the server gave the request up before its first token")
        }
        status if status.is_client_error() => {
            KvistError::new(Code::InvalidArgument, server_message(body)).before_start()
        }
        status => KvistError::new(Code::EngineFailed, format!("the server failed with status {}", status.as_u16())),
    }
}

/// What a server says in the middle of a stream.
pub(crate) fn failure_in_stream(event: &Value) -> KvistError {
    let code = event.pointer("/error/code").and_then(Value::as_u64).unwrap_or(500);
    let code = u16::try_from(code).ok().and_then(|code| StatusCode::from_u16(code).ok());
    match code {
        Some(status) if status.is_client_error() => {
            KvistError::new(Code::InvalidArgument, message(event).unwrap_or_else(unsaid))
        }
        _ => KvistError::new(Code::EngineFailed, "the server failed while it answered"),
    }
}

fn server_message(body: &[u8]) -> String {
    serde_json::from_slice(body).ok().as_ref().and_then(message).unwrap_or_else(unsaid)
}

fn message(value: &Value) -> Option<String> {
    let text = value.pointer("/error/message").or_else(|| value.get("message"))?.as_str()?;
    Some(text.chars().take(LONGEST_MESSAGE).collect())
}

fn unsaid() -> String {
    "the server refused the request without saying why".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, body: &str) -> KvistError {
        refusal(StatusCode::from_u16(status).unwrap(), &HeaderMap::new(), body.as_bytes(), "")
    }

    #[test]
    fn every_status_has_its_error() {
        let said = r#"{"error":{"message":"top_p must be in (0, 1]","code":400}}"#;
        for (status, body, code, not_started) in [
            (400, said, Code::InvalidArgument, true),
            (422, "{", Code::InvalidArgument, true),
            (401, "", Code::EngineUnavailable, true),
            (403, "", Code::EngineUnavailable, true),
            (404, "", Code::EngineUnavailable, true),
            (413, "", Code::RequestTooLarge, true),
            (429, "", Code::Overloaded, true),
            (503, "", Code::Overloaded, true),
            (504, "", Code::FirstTokenTimeout, false),
            (500, said, Code::EngineFailed, false),
            (302, "", Code::EngineFailed, false),
        ] {
            let error = refused(status, body);
            assert_eq!((code, not_started), (error.code, error.not_started), "{status}");
        }
        assert_eq!("top_p must be in (0, 1]", refused(400, said).message);
        assert_eq!(Some(Duration::from_secs(1)), refused(429, "").retry_after);
    }

    #[test]
    fn the_server_says_when_to_come_back_and_which_adapter_it_lacks() {
        let headers = HeaderMap::from_iter([(header::RETRY_AFTER, "7".parse().unwrap())]);
        let error = refusal(StatusCode::TOO_MANY_REQUESTS, &headers, b"", "");
        assert_eq!(Some(Duration::from_secs(7)), error.retry_after);
        let error = refusal(StatusCode::NOT_FOUND, &HeaderMap::new(), b"", "poet");
        assert_eq!(Code::UnknownModel, error.code);
    }

    #[test]
    fn what_a_server_says_is_cut() {
        let body = format!(r#"{{"error":{{"message":"{}"}}}}"#, "é".repeat(2_000));
        assert_eq!(LONGEST_MESSAGE, refused(400, &body).message.chars().count());
    }
}
