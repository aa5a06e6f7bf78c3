//! Which web pages may ask from a browser (CORS). Off unless origins are named.

use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use kvist_errors::{Code, KvistError};

use crate::body::EdgeBody;

/// How long a browser may keep what it was told before a request.
const KEPT_SECONDS: &str = "600";
/// Headers of answers that scripts may read beside those that they always may.
const READABLE: &str = "x-request-id, request-id, retry-after, retry-after-ms, x-should-retry, \
                        x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, \
                        x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens";

/// The origins that may ask.
#[derive(Clone, Debug, Default)]
pub struct Cors {
    is_for_all: bool,
    origins: Vec<HeaderValue>,
}

impl Cors {
    /// Origins such as `https://chat.example.com`, or `*` for all.
    ///
    /// # Errors
    /// One of them is none.
    pub fn new(origins: &[String]) -> Result<Self, KvistError> {
        let mut cors = Self::default();
        for (position, origin) in origins.iter().enumerate() {
            if origin == "*" {
                cors.is_for_all = true;
                continue;
            }
            let value = is_origin(origin).then(|| HeaderValue::try_from(origin).ok()).flatten();
            cors.origins.push(value.ok_or_else(|| {
                let why = "must be `*` or an origin such as https://chat.example.com, without a path";
                KvistError::field(Code::InvalidArgument, format!("cors_allowed_origins[{position}]"), why)
            })?);
        }
        Ok(cors)
    }

    /// What an answer to this request says about who may read it; none when that is nobody else.
    pub(crate) fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        if self.is_for_all {
            return Some(HeaderValue::from_static("*"));
        }
        self.origins.contains(origin).then(|| origin.clone())
    }

    /// The answer to a browser that asks whether it may ask; none for another request, or for one that may not.
    pub(crate) fn preflight<B>(&self, request: &Request<B>) -> Option<Response<EdgeBody>> {
        if request.method() != Method::OPTIONS || !request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
        {
            return None;
        }
        let allowed = self.allowed(request.headers())?;
        let mut response = Response::new(EdgeBody::whole(""));
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(KEPT_SECONDS));
        // The clients send headers of their own by the dozen, and none of them gives a right.
        if let Some(asked) = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
        }
        self.put(headers, allowed);
        Some(response)
    }

    /// Says in an answer who may read it.
    pub(crate) fn put(&self, headers: &mut HeaderMap, allowed: HeaderValue) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(READABLE));
        if !self.is_for_all {
            headers.append(header::VARY, HeaderValue::from_static("origin"));
        }
    }
}

fn is_origin(text: &str) -> bool {
    let Ok(uri) = text.parse::<Uri>() else { return false };
    let Some((scheme, authority)) = uri.scheme_str().zip(uri.authority()) else { return false };
    // As browsers write it: what is written otherwise would never be equal.
    text == format!("{scheme}://{authority}") && text == text.to_ascii_lowercase() && !authority.as_str().contains('@')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cors(origins: &[&str]) -> Result<Cors, KvistError> {
        Cors::new(&origins.iter().map(|origin| (*origin).to_owned()).collect::<Vec<_>>())
    }

    fn preflight(origin: &str) -> Request<()> {
        Request::options("/v1/chat/completions")
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization, x-stainless-lang")
            .body(())
            .unwrap()
    }

    #[test]
    fn nobody_may_ask_from_a_page_unless_it_is_named() {
        assert!(cors(&[]).unwrap().preflight(&preflight("https://a.example")).is_none());
        let named = cors(&["https://a.example", "http://localhost:3000"]).unwrap();
        assert!(named.preflight(&preflight("https://b.example")).is_none());
        let answer = named.preflight(&preflight("http://localhost:3000")).unwrap();
        assert_eq!(StatusCode::NO_CONTENT, answer.status());
        assert_eq!("http://localhost:3000", answer.headers()["access-control-allow-origin"]);
        assert_eq!("authorization, x-stainless-lang", answer.headers()["access-control-allow-headers"]);
        assert_eq!("origin", answer.headers()["vary"]);
        let all = cors(&["*"]).unwrap().preflight(&preflight("null")).unwrap();
        assert_eq!("*", all.headers()["access-control-allow-origin"]);
    }

    #[test]
    fn what_is_no_origin_is_named() {
        for wrong in ["a.example", "https://a.example/", "https://a.example/path", "https://A.example", "", "**"] {
            let error = cors(&["https://fine.example", wrong]).unwrap_err();
            assert_eq!("cors_allowed_origins[1]", error.fields[0].field, "{wrong}");
        }
    }
}
