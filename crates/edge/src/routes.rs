//! What each path answers.

use std::{convert::Infallible, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use kvist_dialect::Endpoint;
use kvist_errors::{Code, KvistError};
use kvist_proto::router::v1::ModelSummary;
use kvist_router::{ApiKeys, record_failure};
use kvist_telemetry::{ReadyFlag, names};
use serde::Serialize;
use tracing::{Span, field::Empty};

use crate::{
    answer::{Answerer, Refusal, json, refuse, text_of},
    body::EdgeBody,
};

const CHAT_COMPLETIONS: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const COUNT_TOKENS: &str = "/v1/messages/count_tokens";

/// Everything that a connection needs to answer.
pub(crate) struct Routes {
    pub(crate) answerer: Answerer,
    pub(crate) keys: Arc<ApiKeys>,
    pub(crate) ready: ReadyFlag,
    pub(crate) body_limit_bytes: usize,
}

#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    data: Vec<ModelEntry<'a>>,
}

#[derive(Serialize)]
struct ModelEntry<'a> {
    id: &'a str,
    object: &'static str,
    created: i64,
    owned_by: &'static str,
    max_model_len: u32,
}

impl<'a> From<&'a ModelSummary> for ModelEntry<'a> {
    fn from(model: &'a ModelSummary) -> Self {
        Self {
            id: &model.name,
            object: "model",
            created: model.created_at.map_or(0, |created| created.seconds),
            owned_by: "kvist",
            max_model_len: model.context_tokens,
        }
    }
}

#[derive(Serialize)]
struct Version {
    version: &'static str,
}

impl Routes {
    pub(crate) async fn serve(&self, request: Request<Incoming>) -> Result<Response<EdgeBody>, Infallible> {
        let echoed = text_of(request.headers(), "x-request-id").to_owned();
        let is_anthropic = matches!(request.uri().path(), MESSAGES | COUNT_TOKENS);
        Ok(self.route(request).await.unwrap_or_else(|mut refusal| {
            // A request that was refused before it got an id keeps the client's.
            if refusal.request_id.is_none() && !echoed.is_empty() {
                refusal.request_id = Some(echoed);
            }
            refuse(&refusal, is_anthropic)
        }))
    }

    async fn route(&self, request: Request<Incoming>) -> Result<Response<EdgeBody>, Refusal> {
        let path = request.uri().path();
        match (request.method(), path) {
            (&Method::POST, CHAT_COMPLETIONS) => {
                self.complete(Endpoint::ChatCompletions, CHAT_COMPLETIONS, request).await
            }
            (&Method::POST, COMPLETIONS) => self.complete(Endpoint::Completions, COMPLETIONS, request).await,
            (&Method::POST, RESPONSES) => self.complete(Endpoint::Responses, RESPONSES, request).await,
            (&Method::POST, MESSAGES) => self.complete(Endpoint::Messages, MESSAGES, request).await,
            (&Method::POST, COUNT_TOKENS) => Ok(self.answerer.count_tokens(self.body_of(request).await?).await?),
            (&Method::POST, "/tokenize") => Ok(self.answerer.tokenize(self.body_of(request).await?).await?),
            (&Method::POST, "/detokenize") => Ok(self.answerer.detokenize(self.body_of(request).await?).await?),
            (&Method::GET, "/v1/models") => {
                self.check_key(request.headers())?;
                let models = self.answerer.generate().models().await?;
                let data = models.iter().map(ModelEntry::from).collect();
                Ok(write(&ModelList { object: "list", data }))
            }
            (&Method::GET, "/health" | "/readyz") => Ok(match self.ready.reason() {
                None => text(StatusCode::OK, "ok\n".to_owned()),
                Some(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
            }),
            (&Method::GET, "/livez") => Ok(text(StatusCode::OK, "ok\n".to_owned())),
            (&Method::GET, "/version") => Ok(write(&Version { version: env!("CARGO_PKG_VERSION") })),
            (&Method::GET, _) if path.starts_with("/v1/models/") => {
                self.check_key(request.headers())?;
                // Names may hold slashes, and clients escape them or not.
                let name = unescape(path.trim_start_matches("/v1/models/"));
                let models = self.answerer.generate().models().await?;
                let model = models.iter().find(|model| model.name == name).ok_or_else(|| {
                    KvistError::field(Code::UnknownModel, "model", format!("there is no model \"{name}\""))
                })?;
                Ok(write(&ModelEntry::from(model)))
            }
            (method, path) => Err(KvistError::new(Code::NotFound, format!("there is no {method} {path}")).into()),
        }
    }

    fn check_key(&self, headers: &HeaderMap) -> Result<kvist_router::Caller, KvistError> {
        let authorization = headers.get(http::header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        // Clients of the Anthropic API have a header of their own.
        match headers.get("x-api-key").and_then(|value| value.to_str().ok()) {
            Some(key) if authorization.is_none() => self.keys.check_key(key.trim()),
            _ => self.keys.check(authorization),
        }
    }

    /// The body of a request that may ask.
    async fn body_of(&self, request: Request<Incoming>) -> Result<Bytes, KvistError> {
        self.check_key(request.headers())?;
        self.read(request.into_body()).await
    }

    async fn complete(
        &self,
        endpoint: Endpoint,
        route: &'static str,
        request: Request<Incoming>,
    ) -> Result<Response<EdgeBody>, Refusal> {
        let (parts, body) = request.into_parts();
        let span = kvist_telemetry::request_span!(
            names::SPAN_EDGE,
            text_of(&parts.headers, "traceparent"),
            { names::HTTP_METHOD } = "POST",
            { names::HTTP_ROUTE } = route,
            { names::URL_PATH } = route,
            { names::URL_SCHEME } = "http",
            { names::HTTP_STATUS } = Empty,
        );
        let result = self.answer(endpoint, &parts.headers, body, &span).await;
        match &result {
            Ok(response) => {
                span.record(names::HTTP_STATUS, response.status().as_u16());
            }
            Err(refusal) => {
                span.record(names::HTTP_STATUS, refusal.error.code.http_status());
                // Of a request that has an id the router tells itself.
                if refusal.request_id.is_none() {
                    record_failure(&span, refusal.error.code);
                }
            }
        }
        result
    }

    async fn answer(
        &self,
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: Incoming,
        span: &Span,
    ) -> Result<Response<EdgeBody>, Refusal> {
        let caller = self.check_key(headers)?;
        let body = self.read(body).await?;
        self.answerer.answer(endpoint, headers, caller, body, span.clone()).await
    }

    async fn read(&self, body: Incoming) -> Result<Bytes, KvistError> {
        let limit = self.body_limit_bytes;
        let too_large = || KvistError::new(Code::RequestTooLarge, format!("the body is larger than {limit} bytes"));
        // A stated length is believed before a byte is read.
        if body.size_hint().lower() > limit as u64 {
            return Err(too_large());
        }
        match Limited::new(body, limit).collect().await {
            Ok(collected) => Ok(collected.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(too_large()),
            Err(_) => Err(KvistError::new(Code::Cancelled, "the body broke off")),
        }
    }
}

fn write(value: &impl Serialize) -> Response<EdgeBody> {
    json(StatusCode::OK, serde_json::to_vec(value).unwrap_or_default())
}

fn text(status: StatusCode, text: String) -> Response<EdgeBody> {
    let mut response = Response::new(EdgeBody::whole(text));
    *response.status_mut() = status;
    let plain = http::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(http::header::CONTENT_TYPE, plain);
    response
}

/// Undoes percent escapes; what is none stays.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let escaped = (*first == b'%')
            .then(|| after.get(..2))
            .flatten()
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match escaped {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unescaped() {
        assert_eq!("org/model é", unescape("org%2Fmodel%20%C3%A9"));
        assert_eq!("100%", unescape("100%"));
        assert_eq!("%zz", unescape("%zz"));
    }
}
