//! Routes of the OpenAI API.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    Router,
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::Response,
    routing::{get, post},
};
use bytes::{Bytes, BytesMut};
use futures::stream;
use kvist_dialect::{AnswerWriter, Choice, Endpoint, GenerateInput, LogprobRun, TokenLogprob};
use kvist_errors::{Code, KvistError};
use kvist_router::{Generation, RouterCore, TextEvent};

use crate::convert;

/// A comment goes out after this much silence, so that proxies keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// How the edge is.
#[derive(Clone, Debug)]
pub struct EdgeSettings {
    /// Largest body.
    pub body_limit_bytes: usize,
}

#[derive(Clone)]
struct Edge {
    core: Arc<RouterCore>,
    settings: EdgeSettings,
}

/// All routes of the edge.
pub fn http_routes(core: Arc<RouterCore>, settings: EdgeSettings) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/health", get(ready))
        .route("/readyz", get(ready))
        .route("/livez", get(|| async { "ok\n" }))
        .route("/version", get(version))
        .fallback(|| async { refuse(&KvistError::new(Code::NotFound, "there is no such path")) })
        .with_state(Edge { core, settings })
}

async fn ready(State(edge): State<Edge>) -> Response {
    if edge.core.is_ready() {
        answer(StatusCode::OK, "text/plain", "ok\n".into())
    } else {
        answer(StatusCode::SERVICE_UNAVAILABLE, "text/plain", "no cluster state yet\n".into())
    }
}

async fn version() -> Response {
    answer(StatusCode::OK, "application/json", format!("{{\"version\":\"{}\"}}", env!("CARGO_PKG_VERSION")).into())
}

fn model_object(name: &str, created: u64) -> serde_json::Value {
    serde_json::json!({"id": name, "object": "model", "created": created, "owned_by": "kvist"})
}

async fn models(State(edge): State<Edge>) -> Response {
    let data: Vec<serde_json::Value> =
        edge.core.model_names().iter().map(|(name, created)| model_object(name, *created)).collect();
    answer(StatusCode::OK, "application/json", serde_json::json!({"object": "list", "data": data}).to_string().into())
}

async fn model(State(edge): State<Edge>, Path(wanted): Path<String>) -> Response {
    match edge.core.model_names().into_iter().find(|(name, _)| *name == wanted) {
        Some((name, created)) => {
            answer(StatusCode::OK, "application/json", model_object(&name, created).to_string().into())
        }
        None => refuse(&KvistError::field(Code::UnknownModel, "model", format!("there is no model `{wanted}`"))),
    }
}

async fn chat_completions(State(edge): State<Edge>, headers: HeaderMap, body: Body) -> Response {
    handle(edge, headers, body, kvist_dialect::parse_chat_completion).await
}

async fn completions(State(edge): State<Edge>, headers: HeaderMap, body: Body) -> Response {
    handle(edge, headers, body, kvist_dialect::parse_completion).await
}

async fn handle(
    edge: Edge,
    headers: HeaderMap,
    body: Body,
    parse: fn(&[u8]) -> Result<GenerateInput, KvistError>,
) -> Response {
    let own_id = header_text(&headers, "x-request-id").filter(|id| id.len() <= 128).unwrap_or_default();
    let outcome = begin(&edge, &headers, body, &own_id, parse).await;
    let (mut response, request_id) = match outcome {
        Ok(started) => started,
        Err(error) => (refuse(&error), own_id),
    };
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert("x-request-id", value);
    }
    response
}

async fn begin(
    edge: &Edge,
    headers: &HeaderMap,
    body: Body,
    own_id: &str,
    parse: fn(&[u8]) -> Result<GenerateInput, KvistError>,
) -> Result<(Response, String), KvistError> {
    let limit = edge.settings.body_limit_bytes;
    let body = axum::body::to_bytes(body, limit).await.map_err(|_| {
        KvistError::new(Code::RequestTooLarge, format!("the body is larger than {limit} bytes, or was cut"))
    })?;
    let input = parse(&body)?;
    let (endpoint, stream, include_usage) = (input.endpoint, input.stream, input.include_usage);
    let with_logprobs = input.logprobs.is_some();
    let echo = match &input.prompt {
        kvist_dialect::PromptForm::Text(text) if input.echo => text.clone(),
        _ if input.echo => return Err(KvistError::field(Code::UnsupportedField, "echo", "needs a prompt of text")),
        _ => String::new(),
    };
    let mut request = convert::request(input, own_id.to_owned());
    // The texts of log-probabilities are those of the tokens.
    request.return_token_ids = with_logprobs;
    let traceparent = header_text(headers, "traceparent").unwrap_or_default();
    let generation = edge.core.generate(request, None, traceparent).await?;
    let request_id = generation.request_id().to_owned();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let writer = AnswerWriter::new(endpoint, &request_id, created, generation.model(), include_usage);
    let response = if stream {
        stream_answer(generation, writer, endpoint, with_logprobs, echo)
    } else {
        whole_answer(generation, &writer, with_logprobs, echo).await?
    };
    Ok((response, request_id))
}

async fn whole_answer(
    mut generation: Generation,
    writer: &AnswerWriter,
    with_logprobs: bool,
    echo: String,
) -> Result<Response, KvistError> {
    let mut text = echo;
    let mut logprobs: Vec<TokenLogprob> = Vec::new();
    while let Some(events) = generation.next_events().await {
        for event in events {
            match event {
                TextEvent::Delta(delta) => {
                    text.push_str(&delta.text);
                    logprobs.extend(convert::logprobs(&generation, &delta.token_ids, &delta.logprobs));
                }
                TextEvent::Failed(error) => return Err(error),
                TextEvent::Finished(finished) => {
                    let finish = convert::finish_word(&finished);
                    let choice = Choice { index: 0, text, finish, logprobs: with_logprobs.then_some(logprobs) };
                    let mut out = BytesMut::with_capacity(512 + choice.text.len());
                    writer.write_whole(&mut out, &[choice], convert::usage(&finished));
                    return Ok(answer(StatusCode::OK, "application/json", out.freeze()));
                }
            }
        }
    }
    Err(KvistError::new(Code::EngineLost, "the answer ended without a reason"))
}

struct Streaming {
    generation: Generation,
    writer: AnswerWriter,
    with_logprobs: bool,
    begin: bool,
    echo: String,
    /// Characters of the text so far, for the offsets of log-probabilities.
    text_offset: u32,
    ended: bool,
}

fn stream_answer(
    generation: Generation,
    writer: AnswerWriter,
    endpoint: Endpoint,
    with_logprobs: bool,
    echo: String,
) -> Response {
    let begin = endpoint == Endpoint::ChatCompletions || !echo.is_empty();
    let state = Streaming { generation, writer, with_logprobs, begin, text_offset: 0, echo, ended: false };
    // Dropping the body, when the client has gone, drops the generation, which aborts the request.
    let chunks = stream::unfold(state, |mut state| async move {
        let chunk = state.next_chunk().await?;
        Some((Ok::<Bytes, Infallible>(chunk), state))
    });
    let mut response = Response::new(Body::from_stream(chunks));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

impl Streaming {
    /// Everything at hand as one piece of the body; none after the end.
    async fn next_chunk(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        let Ok(events) = tokio::time::timeout(KEEP_ALIVE, self.generation.next_events()).await else {
            return Some(Bytes::from_static(b": keep-alive\n\n"));
        };
        let mut out = BytesMut::with_capacity(512);
        if std::mem::take(&mut self.begin) {
            self.writer.write_start(&mut out, 0);
            if !self.echo.is_empty() {
                let echo = std::mem::take(&mut self.echo);
                self.text_offset = u32::try_from(echo.chars().count()).unwrap_or(u32::MAX);
                self.writer.write_delta(&mut out, 0, &echo, None);
            }
        }
        let Some(events) = events else {
            self.ended = true;
            let error = KvistError::new(Code::EngineLost, "the answer ended without a reason");
            self.writer.write_error(&mut out, &error);
            return Some(out.freeze());
        };
        for event in events {
            match event {
                TextEvent::Delta(delta) => {
                    let logprobs = self
                        .with_logprobs
                        .then(|| convert::logprobs(&self.generation, &delta.token_ids, &delta.logprobs));
                    let run = logprobs.as_deref().map(|tokens| LogprobRun { tokens, text_offset: self.text_offset });
                    self.writer.write_delta(&mut out, delta.index, &delta.text, run);
                    self.text_offset = run.map_or(self.text_offset, |run| run.end_offset());
                }
                TextEvent::Finished(finished) => {
                    self.ended = true;
                    self.writer.write_finish(&mut out, 0, convert::finish_word(&finished));
                    self.writer.write_done(&mut out, convert::usage(&finished));
                }
                TextEvent::Failed(error) => {
                    self.ended = true;
                    self.writer.write_error(&mut out, &error);
                }
            }
        }
        Some(out.freeze())
    }
}

fn header_text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

fn answer(status: StatusCode, content_type: &'static str, body: Bytes) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn refuse(error: &KvistError) -> Response {
    let form = error.to_openai_http();
    let status = StatusCode::from_u16(form.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = answer(status, "application/json", form.body.into());
    for (name, value) in form.headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}
