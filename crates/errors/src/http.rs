//! Errors as HTTP clients see them.

use std::time::Duration;

use serde::Serialize;

use crate::{Code, KvistError};

/// Status, retry headers and body of an error, in the dialect of the OpenAI API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpForm {
    /// HTTP status.
    pub status: u16,
    /// Name and value of further headers.
    pub headers: Vec<(&'static str, String)>,
    /// JSON body.
    pub body: Vec<u8>,
}

#[derive(Serialize)]
struct Body<'a> {
    error: Inner<'a>,
}

// Clients expect all four keys, null where nothing is known.
#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: &'a str,
}

impl KvistError {
    /// The `{"error": …}` object of the OpenAI API, as JSON text.
    #[must_use]
    pub fn to_openai_json(&self) -> Vec<u8> {
        let body = Body {
            error: Inner {
                message: &self.message,
                r#type: self.code.openai_type(),
                param: self.fields.first().map(|violation| violation.field.as_str()),
                code: self.code.openai_code(),
            },
        };
        serde_json::to_vec(&body).unwrap_or_default()
    }

    /// The whole HTTP answer.
    #[must_use]
    pub fn to_openai_http(&self) -> HttpForm {
        let mut headers = vec![("x-should-retry", self.code.is_retryable().to_string())];
        if self.code.is_retryable() {
            let wait = self.retry_after.unwrap_or(Duration::from_secs(1));
            headers.push(("retry-after", wait.as_secs_f64().ceil().max(1.0).to_string()));
            headers.push(("retry-after-ms", wait.as_millis().to_string()));
        }
        if self.code == Code::InvalidApiKey {
            headers.push(("www-authenticate", "Bearer".to_owned()));
        }
        HttpForm { status: self.code.http_status(), headers, body: self.to_openai_json() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_has_all_four_keys() {
        let form = KvistError::new(Code::UnknownModel, "no model \"x\"").to_openai_http();
        assert_eq!(404, form.status);
        assert_eq!(
            r#"{"error":{"message":"no model \"x\"","type":"invalid_request_error","param":null,"code":"model_not_found"}}"#,
            String::from_utf8(form.body).unwrap()
        );
    }

    #[test]
    fn overload_says_when_to_come_back() {
        let error = KvistError::new(Code::QueueFull, "full").with_retry_after(Duration::from_millis(1200));
        let headers = error.to_openai_http().headers;
        assert!(headers.contains(&("retry-after", "2".to_owned())));
        assert!(headers.contains(&("retry-after-ms", "1200".to_owned())));
    }
}
