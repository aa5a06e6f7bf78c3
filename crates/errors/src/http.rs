//! Errors as HTTP clients see them.

use std::time::Duration;

use serde::Serialize;

use crate::{Code, KvistError};

/// Status, retry headers and body of an error, in the dialect of one API.
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

#[derive(Serialize)]
struct AnthropicBody<'a> {
    r#type: &'static str,
    error: AnthropicInner<'a>,
    request_id: Option<&'a str>,
}

#[derive(Serialize)]
struct AnthropicInner<'a> {
    r#type: &'a str,
    message: &'a str,
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

    /// The `{"type": "error", …}` object of the Anthropic API, as JSON text.
    #[must_use]
    pub fn to_anthropic_json(&self, request_id: Option<&str>) -> Vec<u8> {
        let error = AnthropicInner { r#type: self.code.anthropic_type(), message: &self.message };
        serde_json::to_vec(&AnthropicBody { r#type: "error", error, request_id }).unwrap_or_default()
    }

    /// The whole HTTP answer to a client of the OpenAI API.
    #[must_use]
    pub fn to_openai_http(&self) -> HttpForm {
        HttpForm { status: self.code.http_status(), headers: self.http_headers(), body: self.to_openai_json() }
    }

    /// The whole HTTP answer to a client of the Anthropic API.
    #[must_use]
    pub fn to_anthropic_http(&self, request_id: Option<&str>) -> HttpForm {
        let body = self.to_anthropic_json(request_id);
        HttpForm { status: self.code.http_status(), headers: self.http_headers(), body }
    }

    fn http_headers(&self) -> Vec<(&'static str, String)> {
        let mut headers = vec![("x-should-retry", self.code.is_retryable().to_string())];
        if self.code.is_retryable() {
            let wait = self.retry_after.unwrap_or(Duration::from_secs(1));
            headers.push(("retry-after", wait.as_secs_f64().ceil().max(1.0).to_string()));
            headers.push(("retry-after-ms", wait.as_millis().to_string()));
        }
        if self.code == Code::InvalidApiKey {
            headers.push(("www-authenticate", "Bearer".to_owned()));
        }
        headers
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
    fn the_body_for_anthropic_clients_names_the_request() {
        let form = KvistError::new(Code::UnknownModel, "no model \"x\"").to_anthropic_http(Some("r-1"));
        assert_eq!(404, form.status);
        assert_eq!(
            r#"{"type":"error","error":{"type":"not_found_error","message":"no model \"x\""},"request_id":"r-1"}"#,
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
