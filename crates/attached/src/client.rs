//! HTTP to one server.

use std::{path::Path, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client as HyperClient, Error as ClientError, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kvist_errors::{Code, KvistError};
use serde_json::Value;

use crate::{
    key::Key,
    settings::{AttachedSettings, wrong},
};

/// How long a connection is kept for the next request: less than the five seconds after which uvicorn closes it.
const IDLE_TIME: Duration = Duration::from_secs(3);
/// For questions about the server itself.
const QUESTION_LIMIT: Duration = Duration::from_secs(30);
/// Most bytes of an answer that is not a stream.
const WHOLE_LIMIT_BYTES: usize = 16 * 1024 * 1024;

/// One server, and connections to it.
#[derive(Debug)]
pub(crate) struct Client {
    base: String,
    host: String,
    http: HyperClient<HttpsConnector<HttpConnector>, Full<Bytes>>,
    key: Option<Key>,
}

/// An answer that is no stream.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
}

impl Reply {
    /// The body as JSON; null where it is none.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// The body of a good answer as JSON; none of any other.
    pub(crate) fn good_json(&self) -> Option<Value> {
        self.status.is_success().then(|| serde_json::from_slice(&self.body).ok())?
    }
}

impl Client {
    /// A client that has not asked anything. `keys` is the folder of the node's keys.
    ///
    /// # Errors
    /// The settings cannot be used.
    pub(crate) fn new(settings: &AttachedSettings, keys: Option<&Path>) -> Result<Self, KvistError> {
        let find = |name: &String| Key::find(keys, name, settings.base());
        let key = settings.api_key.as_ref().map(find).transpose()?;
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(Duration::from_secs_f64(settings.connect_timeout_seconds)));
        let connector = HttpsConnectorBuilder::new()
            .with_native_roots()
            .map_err(|_| wrong("url", "the system has no certificates to check the server's with"))?
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let http = HyperClient::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIME)
            .build(connector);
        let uri: Uri = settings.base().parse().map_err(|_| wrong("url", "is no URL"))?;
        Ok(Self { base: settings.base().to_owned(), host: uri.host().unwrap_or_default().to_owned(), http, key })
    }

    /// The host that the server is at, as its URL has it.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// Asks for something about the server.
    ///
    /// # Errors
    /// Nobody answers, or not in time.
    pub(crate) async fn get(&self, path: &str) -> Result<Reply, KvistError> {
        self.whole(Method::GET, path, HeaderMap::new(), Bytes::new()).await
    }

    /// Posts a question whose answer is no stream.
    ///
    /// # Errors
    /// As for [`Client::get`].
    pub(crate) async fn ask(&self, path: &str, headers: HeaderMap, body: &Value) -> Result<Reply, KvistError> {
        self.whole(Method::POST, path, headers, body.to_string().into()).await
    }

    /// Posts a request and returns the beginning of its answer. Dropping that closes the connection, which is how a
    /// server hears that nobody wants the rest.
    ///
    /// # Errors
    /// Nobody answers.
    pub(crate) async fn post(
        &self,
        path: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response<Incoming>, KvistError> {
        let request = self.request(Method::POST, path, headers, body)?;
        self.http.request(request).await.map_err(|error| unreachable_error(&error))
    }

    async fn whole(&self, method: Method, path: &str, headers: HeaderMap, body: Bytes) -> Result<Reply, KvistError> {
        let request = self.request(method, path, headers, body)?;
        let asking = async {
            let response = self.http.request(request).await.map_err(|error| unreachable_error(&error))?;
            let status = response.status();
            Ok(Reply { status, body: whole(response.into_body()).await? })
        };
        let late = |_| KvistError::new(Code::ConnectTimeout, "the server did not answer in time").before_start();
        tokio::time::timeout(QUESTION_LIMIT, asking).await.map_err(late)?
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, KvistError> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .body(Full::new(body))
            .map_err(|_| KvistError::new(Code::Internal, "the address of the server is wrong"))?;
        *request.headers_mut() = headers;
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = &self.key {
            request.headers_mut().insert(header::AUTHORIZATION, key.bearer()?);
        }
        Ok(request)
    }
}

/// All of an answer.
///
/// # Errors
/// It broke off, or it is too large.
pub(crate) async fn whole(body: Incoming) -> Result<Bytes, KvistError> {
    let collected = Limited::new(body, WHOLE_LIMIT_BYTES).collect().await;
    collected.map(http_body_util::Collected::to_bytes).map_err(|_| lost())
}

/// Adds a header whose value comes from a request; what cannot be one is left out.
pub(crate) fn put(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value)
        && !value.is_empty()
    {
        headers.insert(HeaderName::from_static(name), value);
    }
}

/// The answer broke off.
pub(crate) fn lost() -> KvistError {
    KvistError::new(Code::EngineLost, "the server's answer broke off")
}

fn unreachable_error(error: &ClientError) -> KvistError {
    if error.is_connect() {
        return KvistError::new(Code::EngineUnavailable, "the server cannot be reached").before_start();
    }
    KvistError::new(Code::EngineLost, "the server closed the connection before it answered")
}
