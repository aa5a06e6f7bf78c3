//! Asking upstreams.

use std::{collections::HashMap, io, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, Error as ClientError, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kvist_errors::{Code, KvistError};
use kvist_router::{EventStream, GenerateInput, RouterSettings, StageLimits, StageTimer, UpstreamSettings};
use kvist_schedule::Report;
use kvist_telemetry::Metrics;
use rustls_pki_types::{CertificateDer, pem::PemObject as _};
use serde_json::Value;
use tokio::time::Instant;

use crate::{
    fleet::{Fleet, Member},
    metrics::{Counted, UpstreamMetrics},
    relay::{Relayed, Whole, relayed},
    source::{Source, late},
    translate,
};

/// How long a connection is kept for the next request.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// Most of what a provider says about an error that a client gets to read.
const LONGEST_MESSAGE: usize = 500;

/// All upstreams of a router, by model.
#[derive(Debug)]
pub struct Upstreams {
    fleets: HashMap<String, Fleet>,
    stages: StageLimits,
    default_deadline: Duration,
    metrics: UpstreamMetrics,
}

/// One server.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) name: String,
    url: String,
    api_key_file: Option<PathBuf>,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

/// What is asked of an upstream beside its content.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The id of the request here, which the upstream is told.
    pub request_id: Arc<str>,
    /// W3C trace context; empty when not traced.
    pub traceparent: String,
    /// When the answer is no longer wanted; none for the router's default.
    pub deadline: Option<std::time::Instant>,
}

impl Upstreams {
    /// The upstreams of a router's settings.
    ///
    /// # Errors
    /// Files of certificates or keys cannot be read.
    pub fn new(settings: &RouterSettings, metrics: &Metrics) -> Result<Self, KvistError> {
        let mut members: HashMap<String, Vec<(Arc<Upstream>, String)>> = HashMap::new();
        for upstream in &settings.upstreams {
            let connected = Arc::new(Upstream::new(upstream)?);
            for (name, known) in &upstream.models {
                members.entry(name.clone()).or_default().push((Arc::clone(&connected), known.clone()));
            }
        }
        Ok(Self {
            fleets: members.into_iter().map(|(model, members)| (model, Fleet::new(members))).collect(),
            stages: settings.stage_limits(),
            default_deadline: Duration::from_millis(settings.default_deadline_ms),
            metrics: UpstreamMetrics::new(metrics),
        })
    }

    /// Whether there is nothing to ask.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.fleets.is_empty()
    }

    /// Whether an upstream serves a model.
    #[must_use]
    pub fn serves(&self, model: &str) -> bool {
        self.fleets.contains_key(model)
    }

    /// Names of the models, in order.
    #[must_use]
    pub fn models(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.fleets.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Passes a request on whose answer is in the form that the client asked for. `path` is that behind the API's start,
    /// such as `/chat/completions`.
    ///
    /// # Errors
    /// Nothing of an answer was passed on: the upstream cannot be reached, is too slow, rests, or has failed.
    pub async fn relay(
        &self,
        ask: Ask,
        path: &str,
        model: &str,
        body: Bytes,
        is_stream: bool,
    ) -> Result<Relayed, KvistError> {
        let (fleet, member) = self.choose(model)?;
        let body = with_model(body, model, &member.model)?;
        let mut counted = self.metrics.begin(&member.upstream.name);
        let sent = self.send(&ask, fleet, member, path, body, is_stream).await;
        let (status, source) = note(sent, &mut counted)?;
        if is_stream && status == StatusCode::OK {
            return Ok(Relayed::Stream(relayed(source, counted)));
        }
        let body = note(source.whole().await, &mut counted)?;
        counted.ended(if status.is_success() { "finished" } else { Code::InvalidArgument.name() });
        Ok(Relayed::Whole(Whole { status, body }))
    }

    /// Asks for a chat completion and returns its events as those of an engine.
    ///
    /// # Errors
    /// As for [`Upstreams::relay`], and what cannot be said as a chat completion.
    pub async fn generate(&self, ask: Ask, input: GenerateInput) -> Result<EventStream, KvistError> {
        let (fleet, member) = self.choose(&input.model)?;
        let choices = input.sampling.choices.unwrap_or(1);
        let body = translate::chat_body(input, &member.model)?;
        let mut counted = self.metrics.begin(&member.upstream.name);
        let sent = self.send(&ask, fleet, member, "/chat/completions", body, true).await;
        let (status, source) = note(sent, &mut counted)?;
        if status != StatusCode::OK {
            let body = note(source.whole().await, &mut counted)?;
            let error = KvistError::new(Code::InvalidArgument, provider_message(&body));
            return note(Err(error), &mut counted);
        }
        Ok(EventStream::new(ask.request_id, 0, translate::events(source, counted, choices)))
    }

    fn choose(&self, model: &str) -> Result<(&Fleet, &Member), KvistError> {
        let fleet = self
            .fleets
            .get(model)
            .ok_or_else(|| KvistError::field(Code::UnknownModel, "model", format!("there is no model \"{model}\"")))?;
        Ok((fleet, fleet.choose()?))
    }

    /// Sends a request and returns the beginning of its answer: a good one, or one that says what the client did wrong.
    async fn send(
        &self,
        ask: &Ask,
        fleet: &Fleet,
        member: &Member,
        path: &str,
        body: Bytes,
        is_stream: bool,
    ) -> Result<(StatusCode, Source), KvistError> {
        let upstream = &member.upstream;
        let deadline = ask.deadline.map_or_else(|| Instant::now() + self.default_deadline, Instant::from_std);
        // An answer that is no stream begins when it is complete: of its stages nothing can be told.
        let mut stages = StageTimer::new(if is_stream { self.stages } else { StageLimits::default() });
        let request = upstream.request(ask, path, body, is_stream)?;
        let sent = tokio::select! {
            biased;
            sent = upstream.client.request(request) => sent.map_err(|error| unreachable_error(&error)),
            () = tokio::time::sleep_until(deadline) => Err(late()),
            error = stages.expired() => Err(error),
        };
        let response = sent.inspect_err(|error| fleet.report(member, report_of(error.code)))?;
        match judge(&response) {
            None => {
                let is_good = response.status().is_success();
                fleet.report(member, if is_good { Report::Success } else { Report::ClientError });
                let status = response.status();
                Ok((status, Source::new(response.into_body(), deadline, stages)))
            }
            Some((report, error)) => {
                fleet.report(member, report);
                tracing::warn!(upstream = %upstream.name, status = response.status().as_u16(), "upstream_failed");
                Err(error)
            }
        }
    }
}

impl Upstream {
    fn new(settings: &UpstreamSettings) -> Result<Self, KvistError> {
        let wrong = |field: &str, why: String| {
            KvistError::field(Code::InvalidArgument, format!("upstreams.{}.{field}", settings.name), why)
        };
        let tls = match &settings.tls_ca_file {
            None => HttpsConnectorBuilder::new()
                .with_native_roots()
                .map_err(|_| wrong("tls_ca_file", "the system has no certificates; name a file".to_owned()))?,
            Some(file) => {
                let mut roots = rustls::RootCertStore::empty();
                let unusable = || wrong("tls_ca_file", "cannot be read as PEM".to_owned());
                for certificate in CertificateDer::pem_file_iter(file).map_err(|_| unusable())? {
                    roots.add(certificate.map_err(|_| unusable())?).map_err(|_| unusable())?;
                }
                let provider = Arc::new(rustls::crypto::ring::default_provider());
                let config = rustls::ClientConfig::builder_with_provider(provider)
                    .with_safe_default_protocol_versions()
                    .map_err(|_| unusable())?
                    .with_root_certificates(roots)
                    .with_no_client_auth();
                HttpsConnectorBuilder::new().with_tls_config(config)
            }
        };
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(Duration::from_millis(settings.connect_timeout_ms)));
        let connector = tls.https_or_http().enable_http1().wrap_connector(connector);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIME)
            .build(connector);
        let upstream = Self {
            name: settings.name.clone(),
            url: settings.url.trim_end_matches('/').to_owned(),
            api_key_file: settings.api_key_file.clone(),
            client,
        };
        upstream.authorization().map_err(|error| wrong("api_key_file", error.message))?;
        Ok(upstream)
    }

    /// The bearer with the key. Read for each request, so that a new key is taken up without a restart; the file is in
    /// memory after the first time.
    fn authorization(&self) -> Result<Option<HeaderValue>, KvistError> {
        let Some(file) = &self.api_key_file else { return Ok(None) };
        let unreadable =
            || KvistError::new(Code::EngineUnavailable, "the provider's key cannot be read").before_start();
        let key = std::fs::read_to_string(file).map_err(|_| unreadable())?;
        let mut value = HeaderValue::try_from(format!("Bearer {}", key.trim())).map_err(|_| unreadable())?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    fn request(&self, ask: &Ask, path: &str, body: Bytes, is_stream: bool) -> Result<Request<Full<Bytes>>, KvistError> {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let accept = if is_stream { "text/event-stream" } else { "application/json" };
        headers.insert(header::ACCEPT, HeaderValue::from_static(accept));
        headers.extend(self.authorization()?.map(|value| (header::AUTHORIZATION, value)));
        for (name, value) in [("x-request-id", &*ask.request_id), ("traceparent", &ask.traceparent)] {
            if let Ok(value) = HeaderValue::from_str(value)
                && !value.is_empty()
            {
                headers.insert(name, value);
            }
        }
        let mut request = Request::post(format!("{}{path}", self.url))
            .body(Full::new(body))
            .map_err(|_| KvistError::new(Code::Internal, "the address of an upstream is wrong"))?;
        *request.headers_mut() = headers;
        Ok(request)
    }
}

/// Keeps the outcome of what failed.
fn note<T>(result: Result<T, KvistError>, counted: &mut Counted) -> Result<T, KvistError> {
    result.inspect_err(|error| counted.ended(error.code.name()))
}

/// The body with the model's name as the upstream knows it; untouched where that is the same.
fn with_model(body: Bytes, name: &str, known: &str) -> Result<Bytes, KvistError> {
    if name == known {
        return Ok(body);
    }
    let mut value: Value =
        serde_json::from_slice(&body).map_err(|_| KvistError::new(Code::InvalidArgument, "the body is not JSON"))?;
    if let Some(model) = value.get_mut("model") {
        *model = Value::String(known.to_owned());
    }
    Ok(value.to_string().into())
}

fn unreachable_error(error: &ClientError) -> KvistError {
    let is_timeout = {
        let mut source = std::error::Error::source(error);
        std::iter::from_fn(|| {
            let present = source?;
            source = present.source();
            Some(present)
        })
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|cause| cause.kind() == io::ErrorKind::TimedOut))
    };
    if !error.is_connect() {
        return KvistError::new(Code::EngineLost, "the provider closed the connection before it answered");
    }
    if is_timeout {
        return KvistError::new(Code::ConnectTimeout, "the provider took no connection in time").before_start();
    }
    KvistError::new(Code::EngineUnavailable, "the provider cannot be reached").before_start()
}

fn report_of(code: Code) -> Report {
    match code {
        Code::EngineUnavailable | Code::EngineLost => Report::ConnectFailure,
        _ => Report::TimedOut,
    }
}

/// What the head of an answer means when it is not to be passed on. What is wrong between the mesh and the
/// provider is no fault of the client, and is not told as one.
fn judge(response: &Response<Incoming>) -> Option<(Report, KvistError)> {
    let status = response.status();
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            let retry_after = response
                .headers()
                .get(header::RETRY_AFTER)
                .and_then(|value| value.to_str().ok()?.trim().parse().ok())
                .map(Duration::from_secs);
            let error = KvistError::new(Code::Overloaded, "the provider takes no more requests at the moment")
                .with_retry_after(retry_after.unwrap_or(Duration::from_secs(1)));
            Some((Report::Overloaded(retry_after), error))
        }
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PAYMENT_REQUIRED => {
            let error = KvistError::new(Code::EngineFailed, "the provider refused the mesh's own key");
            Some((Report::ClientError, error))
        }
        status if status.is_server_error() || status.is_redirection() || status.is_informational() => {
            let message = format!("the provider failed with status {}", status.as_u16());
            Some((Report::ServerError, KvistError::new(Code::EngineFailed, message)))
        }
        _ => None,
    }
}

/// What a provider says is wrong with a request.
fn provider_message(body: &[u8]) -> String {
    let value: Option<Value> = serde_json::from_slice(body).ok();
    let message = value.as_ref().and_then(|value| value.pointer("/error/message")).and_then(Value::as_str);
    let message = message.unwrap_or("the provider refused the request without saying why");
    message.chars().take(LONGEST_MESSAGE).collect()
}
