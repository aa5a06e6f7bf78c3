//! What each path answers.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use kvist_dialect::Endpoint;
use kvist_errors::{Code, KvistError};
use kvist_proto::router::v1::ModelSummary;
use kvist_router::{ApiKeys, Caller, RateLimits, record_failure};
use kvist_telemetry::{ReadyFlag, names};
use serde::Serialize;
use tracing::{Span, field::Empty};

use crate::{
    answer::{Answerer, REQUEST_ID, Refusal, json, put_request_id, refuse, text_of},
    body::EdgeBody,
    cors::Cors,
    rate_limits::put_rate_limits,
    request_ids::RequestIds,
};

const CHAT_COMPLETIONS: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const EMBEDDINGS: &str = "/v1/embeddings";
const MESSAGES: &str = "/v1/messages";
const COUNT_TOKENS: &str = "/v1/messages/count_tokens";

/// Most bytes of all names and values of headers. Above about 400 KB the HTTP library refuses them itself, in no form.
const HEADERS_LIMIT_BYTES: usize = 32 * 1024;

/// What is read of a body that was refused already, so that a client that is still sending gets to read why.
const LINGER_BYTES: usize = 16 * 1024 * 1024;
const LINGER_TIME: Duration = Duration::from_secs(2);

/// Limits of a body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    pub(crate) bytes: usize,
    pub(crate) time: Duration,
}

/// Everything that a connection needs to answer.
pub(crate) struct Routes {
    answerer: Answerer,
    keys: Arc<ApiKeys>,
    ready: ReadyFlag,
    limits: BodyLimits,
    ids: RequestIds,
    cors: Cors,
}

/// What engines are asked for.
#[derive(Clone, Copy, Debug)]
enum Work {
    Generate(Endpoint),
    Embed,
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
    pub(crate) fn new(
        answerer: Answerer,
        keys: Arc<ApiKeys>,
        ready: ReadyFlag,
        limits: BodyLimits,
        cors: Cors,
    ) -> Self {
        Self { answerer, keys, ready, limits, ids: RequestIds::new(), cors }
    }

    pub(crate) async fn serve(&self, request: Request<Incoming>) -> Result<Response<EdgeBody>, Infallible> {
        let asked_id = RequestIds::of_client(text_of(request.headers(), REQUEST_ID));
        let is_anthropic = matches!(request.uri().path(), MESSAGES | COUNT_TOKENS);
        // A request that was answered before the router gave it an id keeps the client's, or gets one here.
        let own_id = || asked_id.unwrap_or_else(|| self.ids.next());
        let readable_by = self.cors.allowed(request.headers());
        let mut limits = RateLimits::default();
        let mut response = match self.route(request, &mut limits).await {
            Ok(mut response) => {
                if !response.headers().contains_key(REQUEST_ID) {
                    put_request_id(&mut response, is_anthropic, &own_id());
                }
                response
            }
            Err(mut refusal) => {
                refusal.request_id = Some(refusal.request_id.unwrap_or_else(own_id));
                refuse(&refusal, is_anthropic)
            }
        };
        put_rate_limits(response.headers_mut(), &limits);
        if let Some(origin) = readable_by {
            self.cors.put(response.headers_mut(), origin);
        }
        Ok(response)
    }

    async fn route(&self, request: Request<Incoming>, limits: &mut RateLimits) -> Result<Response<EdgeBody>, Refusal> {
        if let Some(preflight) = self.cors.preflight(&request) {
            return Ok(preflight);
        }
        let headers_bytes: usize =
            request.headers().iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
        if headers_bytes > HEADERS_LIMIT_BYTES {
            let message = format!("the headers are larger than {HEADERS_LIMIT_BYTES} bytes");
            return Err(KvistError::new(Code::HeadersTooLarge, message).into());
        }
        let path = request.uri().path();
        match (request.method(), path) {
            (&Method::POST, CHAT_COMPLETIONS) => {
                self.work(Work::Generate(Endpoint::ChatCompletions), CHAT_COMPLETIONS, request, limits).await
            }
            (&Method::POST, COMPLETIONS) => {
                self.work(Work::Generate(Endpoint::Completions), COMPLETIONS, request, limits).await
            }
            (&Method::POST, RESPONSES) => {
                self.work(Work::Generate(Endpoint::Responses), RESPONSES, request, limits).await
            }
            (&Method::POST, MESSAGES) => self.work(Work::Generate(Endpoint::Messages), MESSAGES, request, limits).await,
            (&Method::POST, EMBEDDINGS) => self.work(Work::Embed, EMBEDDINGS, request, limits).await,
            (&Method::POST, COUNT_TOKENS) => {
                Ok(self.answerer.count_tokens(self.body_of(request, limits).await?).await?)
            }
            (&Method::POST, "/tokenize") => Ok(self.answerer.tokenize(self.body_of(request, limits).await?).await?),
            (&Method::POST, "/detokenize") => {
                Ok(self.answerer.detokenize(self.body_of(request, limits).await?).await?)
            }
            (&Method::GET, "/v1/models") => {
                self.check_key(request.headers(), limits)?;
                let models = self.models().await?;
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
                self.check_key(request.headers(), limits)?;
                // Names may hold slashes, and clients escape them or not.
                let name = unescape(path.trim_start_matches("/v1/models/"));
                let models = self.models().await?;
                let model = models.iter().find(|model| model.name == name).ok_or_else(|| {
                    KvistError::field(Code::UnknownModel, "model", format!("there is no model \"{name}\""))
                })?;
                Ok(write(&ModelEntry::from(model)))
            }
            (method, path) => Err(KvistError::new(Code::NotFound, format!("there is no {method} {path}")).into()),
        }
    }

    /// The mesh's models, and behind them those of servers outside it.
    async fn models(&self) -> Result<Vec<ModelSummary>, KvistError> {
        let mut models = self.answerer.generate().models().await?;
        for name in self.answerer.upstreams().models() {
            if models.iter().all(|model| model.name != name) {
                models.push(ModelSummary { name: name.to_owned(), ..ModelSummary::default() });
            }
        }
        Ok(models)
    }

    /// Who asks, and where it stands.
    fn check_key(&self, headers: &HeaderMap, limits: &mut RateLimits) -> Result<Caller, KvistError> {
        let authorization = headers.get(http::header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        // Clients of the Anthropic API have a header of their own.
        let caller = match headers.get("x-api-key").and_then(|value| value.to_str().ok()) {
            Some(key) if authorization.is_none() => self.keys.check_key(key.trim()),
            _ => self.keys.check(authorization),
        }?;
        *limits = caller.limits;
        Ok(caller)
    }

    /// The body of a request that may ask.
    async fn body_of(&self, request: Request<Incoming>, limits: &mut RateLimits) -> Result<Bytes, KvistError> {
        self.check_key(request.headers(), limits)?;
        let (parts, body) = request.into_parts();
        self.read(&parts.headers, body).await
    }

    async fn work(
        &self,
        work: Work,
        route: &'static str,
        request: Request<Incoming>,
        limits: &mut RateLimits,
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
        let result = self.answer(work, &parts.headers, body, &span, limits).await;
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
        work: Work,
        headers: &HeaderMap,
        body: Incoming,
        span: &Span,
        limits: &mut RateLimits,
    ) -> Result<Response<EdgeBody>, Refusal> {
        let caller = self.check_key(headers, limits)?;
        let body = self.read(headers, body).await?;
        let new_id = || RequestIds::of_client(text_of(headers, REQUEST_ID)).unwrap_or_else(|| self.ids.next());
        match work {
            Work::Generate(endpoint) => {
                self.answerer.answer(endpoint, headers, caller, body, span.clone(), new_id).await
            }
            Work::Embed => self.answerer.embed(headers, caller, body, span.clone(), new_id).await,
        }
    }

    async fn read(&self, headers: &HeaderMap, mut body: Incoming) -> Result<Bytes, KvistError> {
        let BodyLimits { bytes: limit, time } = self.limits;
        let deadline = tokio::time::Instant::now() + time;
        // A stated length is believed before a byte is read.
        let is_too_large = body.size_hint().lower() > limit as u64
            || match tokio::time::timeout_at(deadline, Limited::new(&mut body, limit).collect()).await {
                Ok(Ok(collected)) => return Ok(collected.to_bytes()),
                Ok(Err(error)) if error.is::<LengthLimitError>() => true,
                Ok(Err(_)) => return Err(KvistError::new(Code::Cancelled, "the body broke off")),
                Err(_) => {
                    let message = format!("the body was not complete after {} s", time.as_secs_f64());
                    return Err(KvistError::new(Code::BodyTimeout, message));
                }
            };
        debug_assert!(is_too_large);
        // Who asks first whether to send is told before it does.
        if !headers.contains_key(http::header::EXPECT) {
            let lingering = Limited::new(body, LINGER_BYTES).collect();
            let _ = tokio::time::timeout(LINGER_TIME, lingering).await;
        }
        Err(KvistError::new(Code::RequestTooLarge, format!("the body is larger than {limit} bytes")))
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
