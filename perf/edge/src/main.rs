//! An engine that computes nothing, behind OpenAI's HTTP API: a token each step, one event a token, one write an event.
//!
//! `kvist-bench-edge --ready-file PATH --step-microseconds N --model NAME` listens on a free port of loopback, writes
//! `{"address":"host:port"}` into the file and serves until it is asked to end. It has one thread, so that it takes as
//! little as it can of the machine that the routers are measured on.

mod answer;

use std::{convert::Infallible, path::PathBuf, process::ExitCode, rc::Rc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Either, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpListener, signal::unix::SignalKind, task::LocalSet};

use crate::answer::{Asked, Tokens};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Body = Either<Full<Bytes>, Tokens>;

/// The command line.
struct Flags {
    ready_file: PathBuf,
    step: Duration,
    model: String,
}

impl Flags {
    fn read(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let (mut ready_file, mut step, mut model) = (None, None, None);
        let mut arguments = arguments.peekable();
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--ready-file" => ready_file = Some(PathBuf::from(value)),
                "--step-microseconds" => {
                    let microseconds = value.parse().map_err(|_| format!("{name} must be a whole number"))?;
                    step = Some(Duration::from_micros(microseconds));
                }
                "--model" => model = Some(value),
                _ => return Err(format!("there is no flag {name}")),
            }
        }
        Ok(Self {
            ready_file: ready_file.ok_or("--ready-file is missing")?,
            step: step.ok_or("--step-microseconds is missing")?,
            model: model.ok_or("--model is missing")?,
        })
    }
}

fn main() -> ExitCode {
    let flags = match Flags::read(std::env::args().skip(1)) {
        Ok(flags) => flags,
        Err(why) => {
            eprintln!("kvist-bench-edge: {why}");
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let served = runtime.and_then(|runtime| LocalSet::new().block_on(&runtime, serve(flags)));
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvist-bench-edge: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(flags: Flags) -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let unfinished = flags.ready_file.with_extension("part");
    std::fs::write(&unfinished, format!("{{\"address\":\"{address}\"}}"))?;
    std::fs::rename(&unfinished, &flags.ready_file)?;
    let mut ended = tokio::signal::unix::signal(SignalKind::terminate())?;
    let flags = Rc::new(flags);
    loop {
        let (stream, _) = tokio::select! {
            _ = ended.recv() => return Ok(()),
            accepted = listener.accept() => accepted?,
        };
        // An event must not wait for the one before it.
        stream.set_nodelay(true)?;
        let flags = Rc::clone(&flags);
        tokio::task::spawn_local(async move {
            let service = service_fn(move |request| answer(request, Rc::clone(&flags)));
            // How a connection ends is the router's business.
            let _ = http1::Builder::new().writev(false).serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(request: Request<Incoming>, flags: Rc<Flags>) -> Result<Response<Body>, Infallible> {
    Ok(match (request.method(), request.uri().path()) {
        (&Method::POST, "/v1/chat/completions") => {
            let Ok(body) = request.into_body().collect().await else { return Ok(json(StatusCode::BAD_REQUEST, "{}")) };
            match serde_json::from_slice::<Asked>(&body.to_bytes()) {
                Ok(asked) if asked.stream => events(Tokens::new(&flags.model, &asked, flags.step)),
                _ => json(StatusCode::BAD_REQUEST, "{\"error\":{\"message\":\"only streams of chat completions\"}}"),
            }
        }
        (&Method::GET, "/v1/models") => {
            let model = &flags.model;
            json(
                StatusCode::OK,
                format!(
                    "{{\"object\":\"list\",\"data\":[{{\"id\":\"{model}\",\"object\":\"model\",\"created\":0,\"owned_by\":\"bench\"}}]}}"
                ),
            )
        }
        (&Method::GET, "/health" | "/ping") => json(StatusCode::OK, "{}"),
        _ => json(StatusCode::NOT_FOUND, "{}"),
    })
}

fn json(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    respond(status, "application/json", Either::Left(Full::new(body.into())))
}

fn events(tokens: Tokens) -> Response<Body> {
    respond(StatusCode::OK, "text/event-stream; charset=utf-8", Either::Right(tokens))
}

fn respond(status: StatusCode, kind: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}
