//! From a request to its HTTP answer.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use kvist_dialect::{
    AnswerHead, AnswerWriter, Call, Choice, Endpoint, FinishWord, RequestHead, parse_chat_completion, parse_completion,
    parse_count_tokens, parse_detokenize, parse_head, parse_messages, parse_response, parse_tokenize, write_tokens,
};
use kvist_errors::{Code, KvistError};
use kvist_router::{
    CLASS_METADATA, CallDelta, CallHead, Caller, EventStream, Generate, GenerateEvent, Prompt, RequestContext,
    SESSION_METADATA,
};
use kvist_upstream::{Ask, Relayed, Upstreams};
use tokio::sync::Semaphore;
use tracing::Span;

use crate::{
    body::{EdgeBody, EventBody, finish_word, usage_numbers},
    convert::{Form, in_words_of_the_api, logprobs, prompt_of, split},
    prompts::generate_each,
};

pub(crate) const REQUEST_ID: &str = "x-request-id";
/// What clients of the Anthropic API read.
const ANTHROPIC_REQUEST_ID: &str = "request-id";

/// Bodies above this are parsed on a thread of their own.
const INLINE_BODY_BYTES: usize = 64 * 1024;

/// Threads that parse long bodies at once.
const PARSERS: usize = 2;

/// What answers requests.
pub(crate) struct Answerer {
    generate: Arc<dyn Generate>,
    upstreams: Arc<Upstreams>,
    keep_alive: Duration,
    parsers: Semaphore,
}

/// An error and the id of the request it belongs to, when it got one.
pub(crate) struct Refusal {
    pub(crate) error: KvistError,
    pub(crate) request_id: Option<String>,
}

impl From<KvistError> for Refusal {
    fn from(mut error: KvistError) -> Self {
        let request_id = error.metadata.remove("request_id");
        Self { error, request_id }
    }
}

impl Answerer {
    pub(crate) fn new(generate: Arc<dyn Generate>, upstreams: Arc<Upstreams>, keep_alive: Duration) -> Self {
        Self { generate, upstreams, keep_alive, parsers: Semaphore::new(PARSERS) }
    }

    pub(crate) fn upstreams(&self) -> &Upstreams {
        &self.upstreams
    }

    pub(crate) fn generate(&self) -> &dyn Generate {
        &*self.generate
    }

    /// Answers a body of one of the endpoints that generate.
    pub(crate) async fn answer(
        &self,
        endpoint: Endpoint,
        headers: &HeaderMap,
        caller: Caller,
        body: Bytes,
        span: Span,
        new_id: impl FnOnce() -> String,
    ) -> Result<Response<EdgeBody>, Refusal> {
        let context = Self::context(headers, caller, span);
        let now = now_unix_seconds();
        if let Some(head) = self.head_for_upstream(&body).await? {
            let RequestContext { traceparent, deadline, .. } = context;
            let ask = Ask { request_id: new_id().into(), traceparent, deadline };
            return self.ask_upstream(endpoint, ask, head, body, now).await;
        }
        let parsed = self.parse(endpoint, body).await?;
        let (mut form, input) = split(parsed, now);
        let echo = self.echo(&form).await?;
        let further = std::mem::take(&mut form.further_prompts);
        let events = match further.as_slice() {
            [] => self.generate.generate(context, input).await?,
            _ => generate_each(&*self.generate, context, input, further).await?,
        };
        self.write(endpoint, events, form, echo, now).await
    }

    /// What comes with a request in its headers.
    pub(crate) fn context(headers: &HeaderMap, caller: Caller, span: Span) -> RequestContext {
        let time_limit = read_timeout(text_of(headers, "x-request-timeout-ms"));
        RequestContext {
            request_id: text_of(headers, REQUEST_ID).to_owned(),
            deadline: time_limit.map(|left| Instant::now() + left),
            span,
            traceparent: text_of(headers, "traceparent").to_owned(),
            tracestate: text_of(headers, "tracestate").to_owned(),
            caller: caller.name,
            caller_salt: caller.cache_salt,
            door: "http",
            session_id: session_of(headers).to_owned(),
            class: text_of(headers, CLASS_METADATA).to_owned(),
        }
    }

    /// The head of a request whose model is served outside the mesh; none for one of the mesh's own.
    pub(crate) async fn head_for_upstream(&self, body: &Bytes) -> Result<Option<RequestHead>, KvistError> {
        if self.upstreams.is_empty() {
            return Ok(None);
        }
        let head = self.parse_with(parse_head, body.clone()).await?;
        Ok(self.upstreams.serves(&head.model).then_some(head))
    }

    /// Answers by a server outside the mesh. Where it speaks the client's API, its bytes go on as they are.
    async fn ask_upstream(
        &self,
        endpoint: Endpoint,
        ask: Ask,
        head: RequestHead,
        body: Bytes,
        now: i64,
    ) -> Result<Response<EdgeBody>, Refusal> {
        let request_id = Arc::clone(&ask.request_id);
        let refuse = |error| Refusal { error, request_id: Some(request_id.to_string()) };
        let path = match endpoint {
            Endpoint::ChatCompletions => "/chat/completions",
            Endpoint::Completions => "/completions",
            Endpoint::Messages | Endpoint::Responses => {
                let (form, input) = split(self.parse(endpoint, body).await.map_err(refuse)?, now);
                let events = self.upstreams.generate(ask, input).await.map_err(refuse)?;
                return self.write(endpoint, events, form, Vec::new(), now).await;
            }
        };
        let relayed = self.upstreams.relay(ask, path, &head.model, body, head.stream).await.map_err(refuse)?;
        let mut response = match relayed {
            Relayed::Stream(body) => event_stream(EdgeBody::Relayed(body)),
            Relayed::Whole(whole) => json(whole.status, whole.body),
        };
        put_request_id(&mut response, false, &request_id);
        Ok(response)
    }

    async fn write(
        &self,
        endpoint: Endpoint,
        events: EventStream,
        mut form: Form,
        echo: Vec<String>,
        now: i64,
    ) -> Result<Response<EdgeBody>, Refusal> {
        let request_id = events.request_id.to_string();
        let writer = AnswerWriter::new(AnswerHead {
            endpoint: form.endpoint,
            request_id: &request_id,
            created: now.unsigned_abs(),
            model: &form.model,
            include_usage: form.include_usage,
            prompt_tokens: events.prompt_tokens,
            repeated: std::mem::take(&mut form.repeated),
        });
        let result = if form.stream {
            self.stream(events, writer, &form, echo).await
        } else {
            whole(events, &writer, &form, echo).await
        };
        match result {
            Ok(mut response) => {
                put_request_id(&mut response, endpoint == Endpoint::Messages, &request_id);
                Ok(response)
            }
            Err(error) => Err(Refusal { error, request_id: Some(request_id) }),
        }
    }

    /// Answers a body of `/v1/messages/count_tokens`.
    pub(crate) async fn count_tokens(&self, body: Bytes) -> Result<Response<EdgeBody>, KvistError> {
        let (form, input) = split(self.parse_with(parse_count_tokens, body).await?, now_unix_seconds());
        let tokens = self.generate.tokenize(&form.model, input.prompt).await?;
        Ok(json(StatusCode::OK, format!("{{\"input_tokens\":{}}}", tokens.ids.len())))
    }

    /// Answers a body of `/tokenize`.
    pub(crate) async fn tokenize(&self, body: Bytes) -> Result<Response<EdgeBody>, KvistError> {
        let input = self.parse_with(parse_tokenize, body).await?;
        let prompt = prompt_of(input.prompt, input.add_generation_prompt, now_unix_seconds());
        let tokens = self.generate.tokenize(&input.model, prompt).await?;
        let mut out = BytesMut::new();
        write_tokens(&mut out, &tokens.ids, tokens.context_tokens);
        Ok(json(StatusCode::OK, out))
    }

    /// Answers a body of `/detokenize`.
    pub(crate) async fn detokenize(&self, body: Bytes) -> Result<Response<EdgeBody>, KvistError> {
        let input = self.parse_with(parse_detokenize, body).await?;
        let prompt = self.generate.detokenize(&input.model, &input.token_ids).await?;
        Ok(json(StatusCode::OK, serde_json::json!({ "prompt": prompt }).to_string()))
    }

    async fn parse(&self, endpoint: Endpoint, body: Bytes) -> Result<kvist_dialect::GenerateInput, KvistError> {
        let parse = match endpoint {
            Endpoint::ChatCompletions => parse_chat_completion,
            Endpoint::Completions => parse_completion,
            Endpoint::Messages => parse_messages,
            Endpoint::Responses => parse_response,
        };
        self.parse_with(parse, body).await
    }

    pub(crate) async fn parse_with<T: Send + 'static>(
        &self,
        parse: fn(&[u8]) -> Result<T, KvistError>,
        body: Bytes,
    ) -> Result<T, KvistError> {
        if body.len() <= INLINE_BODY_BYTES {
            return parse(&body);
        }
        let stopped = || KvistError::new(Code::Draining, "the process is being stopped");
        let _permit = self.parsers.acquire().await.map_err(|_| stopped())?;
        tokio::task::spawn_blocking(move || parse(&body)).await.map_err(|_| stopped())?
    }

    /// What stands before the text of each choice; empty for nothing.
    async fn echo(&self, form: &Form) -> Result<Vec<String>, KvistError> {
        let mut texts = Vec::with_capacity(form.echo.len());
        for prompt in &form.echo {
            texts.push(match prompt {
                Prompt::Text(text) => text.clone(),
                Prompt::Tokens(ids) => self.generate.detokenize(&form.model, ids).await?,
                Prompt::Chat(_) => String::new(),
            });
        }
        Ok(texts)
    }

    async fn stream(
        &self,
        mut events: EventStream,
        writer: AnswerWriter,
        form: &Form,
        echo: Vec<String>,
    ) -> Result<Response<EdgeBody>, KvistError> {
        // As long as nothing is written, a failure can still be an ordinary HTTP error.
        let batch = match tokio::time::timeout(self.keep_alive, events.next()).await {
            Ok(Some(mut batch)) => {
                if let [GenerateEvent::Failed(_)] = batch.as_slice()
                    && let Some(GenerateEvent::Failed(error)) = batch.pop()
                {
                    return Err(error);
                }
                Some(batch)
            }
            Ok(None) => return Err(broke_off()),
            Err(_) => None,
        };
        let mut body = EventBody::new(events, writer, form, echo, self.keep_alive);
        match batch {
            Some(batch) => body.push(batch),
            None => body.push_keep_alive(),
        }
        Ok(event_stream(EdgeBody::Events(Box::new(body))))
    }
}

fn event_stream(body: EdgeBody) -> Response<EdgeBody> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// One choice as it grows.
#[derive(Default)]
struct Growing {
    text: String,
    reasoning: String,
    calls: Vec<Call>,
    logprobs: Vec<kvist_dialect::TokenLogprob>,
}

impl Growing {
    fn call(&mut self, delta: CallDelta) {
        if let Some(CallHead { id, name }) = delta.head {
            self.calls.push(Call { id, name, ..Call::default() });
        }
        if let Some(call) = self.calls.get_mut(delta.call as usize) {
            call.arguments.push_str(&delta.arguments);
            call.is_complete |= delta.is_end;
        }
    }
}

async fn whole(
    mut events: EventStream,
    writer: &AnswerWriter,
    form: &Form,
    echo: Vec<String>,
) -> Result<Response<EdgeBody>, KvistError> {
    let texts = echo.into_iter().chain(std::iter::repeat_with(String::new)).take(form.choices as usize);
    let mut growing: Vec<Growing> = texts.map(|text| Growing { text, ..Growing::default() }).collect();
    while let Some(batch) = events.next().await {
        for event in batch {
            match event {
                GenerateEvent::Delta(delta) => {
                    if let Some(choice) = growing.get_mut(delta.index as usize) {
                        choice.text.push_str(&delta.text);
                        choice.logprobs.extend(logprobs(delta.logprobs));
                    }
                }
                GenerateEvent::Reasoning(delta) => {
                    if let Some(choice) = growing.get_mut(delta.index as usize).filter(|_| form.include_reasoning) {
                        choice.reasoning.push_str(&delta.text);
                    }
                }
                GenerateEvent::Call(delta) => {
                    if let Some(choice) = growing.get_mut(delta.index as usize) {
                        choice.call(delta);
                    }
                }
                GenerateEvent::Failed(error) => return Err(error),
                GenerateEvent::Finished(end) => {
                    let choice = |(index, choice): (u32, Growing)| {
                        let ended = end.choices.iter().find(|ended| ended.index == index);
                        Choice {
                            index,
                            text: choice.text,
                            reasoning: choice.reasoning,
                            calls: choice.calls,
                            finish: ended.map_or(FinishWord::Stop, finish_word),
                            stop_string: ended.map(|ended| ended.stop_string.clone()).unwrap_or_default(),
                            logprobs: form.logprobs.then_some(choice.logprobs),
                        }
                    };
                    let choices: Vec<Choice> = (0u32..).zip(growing).map(choice).collect();
                    let mut out = BytesMut::with_capacity(512);
                    writer.write_whole(&mut out, &choices, usage_numbers(end.usage));
                    return Ok(json(StatusCode::OK, out));
                }
            }
        }
    }
    Err(broke_off())
}

/// What the end of the events without a last one means.
pub(crate) fn broke_off() -> KvistError {
    KvistError::new(Code::Internal, "the answer broke off")
}

/// A JSON answer.
pub(crate) fn json(status: StatusCode, body: impl Into<Bytes>) -> Response<EdgeBody> {
    let mut response = Response::new(EdgeBody::whole(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The answer to a refused request, in the form of the API it came by.
pub(crate) fn refuse(refusal: &Refusal, is_anthropic: bool) -> Response<EdgeBody> {
    let error = in_words_of_the_api(refusal.error.clone());
    let request_id = refusal.request_id.as_deref();
    let form = if is_anthropic { error.to_anthropic_http(request_id) } else { error.to_openai_http() };
    let status = StatusCode::from_u16(form.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json(status, form.body);
    for (name, value) in form.headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            response.headers_mut().insert(name, value);
        }
    }
    if let Some(request_id) = request_id {
        put_request_id(&mut response, is_anthropic, request_id);
    }
    response
}

pub(crate) fn put_request_id(response: &mut Response<EdgeBody>, is_anthropic: bool, request_id: &str) {
    let Ok(value) = HeaderValue::from_str(request_id) else { return };
    if is_anthropic {
        response.headers_mut().insert(ANTHROPIC_REQUEST_ID, value.clone());
    }
    response.headers_mut().insert(REQUEST_ID, value);
}

pub(crate) fn now_unix_seconds() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(0)
}

pub(crate) fn text_of<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Kvist's own header, or the one that other gateways read.
fn session_of(headers: &HeaderMap) -> &str {
    let own = text_of(headers, SESSION_METADATA);
    if own.is_empty() { text_of(headers, "x-session-id") } else { own }
}

/// A client may say how long it will wait.
fn read_timeout(value: &str) -> Option<Duration> {
    value.trim().parse().ok().filter(|milliseconds| *milliseconds > 0).map(Duration::from_millis)
}
