//! Log lines as structlog writes them, so that the Rust and Python lines of one process read alike.

use std::{
    fmt,
    io::{self, IsTerminal as _},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use serde::Deserialize;
use serde_json::{Map, Value};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{Layer, layer::Context, registry::LookupSpan};

use crate::{calendar::iso_utc, span::place_of};

/// Lines that may wait for the writer; more are dropped and counted rather than slow a request down.
const QUEUED_LINES: usize = 8192;

/// Least time between two writes.
const WRITE_INTERVAL: Duration = Duration::from_millis(10);

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Console on a terminal, else JSON.
    #[default]
    Auto,
    /// One JSON object a line.
    Json,
    /// For people.
    Console,
    /// None at all.
    Off,
}

impl LogFormat {
    pub(crate) fn resolved(self) -> Self {
        match self {
            Self::Auto if io::stderr().is_terminal() => Self::Console,
            Self::Auto => Self::Json,
            other => other,
        }
    }
}

enum Order {
    Line(String),
    Flush(SyncSender<()>),
}

/// Writes lines from a thread of its own, so that a slow terminal or pipe stalls no request.
#[derive(Clone)]
pub struct LogWriter {
    orders: SyncSender<Order>,
    dropped: Arc<AtomicU64>,
}

impl LogWriter {
    /// A writer to any output; stderr for processes.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(output: impl io::Write + Send + 'static) -> io::Result<Self> {
        let (orders, inbox) = sync_channel(QUEUED_LINES);
        let dropped = Arc::new(AtomicU64::new(0));
        thread::Builder::new().name("kvist-log".to_owned()).spawn(move || write_lines(output, &inbox))?;
        Ok(Self { orders, dropped })
    }

    /// Queues one line, which ends without a line feed.
    pub fn write(&self, line: String) {
        if let Err(TrySendError::Full(_)) = self.orders.try_send(Order::Line(line)) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lines dropped because the output was too slow.
    #[must_use]
    pub fn dropped_lines(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Waits until all lines before it are written, or the time is over.
    pub fn flush(&self, time_limit: Duration) {
        let (done, written) = sync_channel(1);
        if self.orders.try_send(Order::Flush(done)).is_ok() {
            // Late or lost: either way the caller goes on.
            let _ = written.recv_timeout(time_limit);
        }
    }
}

fn write_lines(mut output: impl io::Write, inbox: &Receiver<Order>) {
    // Takes all lines at hand into one write.
    let mut pending = Vec::with_capacity(16 * 1024);
    let mut may_write_at = Instant::now();
    while let Ok(first) = inbox.recv() {
        // A lone line is written at once. Those that follow close behind wait here together, since each that met this
        // thread waiting for it would cost a change of task and a write of its own.
        thread::sleep(may_write_at.saturating_duration_since(Instant::now()));
        may_write_at = Instant::now() + WRITE_INTERVAL;
        let mut flushed = Vec::new();
        let mut order = Some(first);
        while let Some(current) = order {
            match current {
                Order::Line(line) => {
                    pending.extend_from_slice(line.as_bytes());
                    pending.push(b'\n');
                }
                Order::Flush(done) => flushed.push(done),
            }
            order = if pending.len() < 64 * 1024 { inbox.try_recv().ok() } else { None };
        }
        // There is nowhere to report that the log cannot be written.
        let _ = output.write_all(&pending).and_then(|()| output.flush());
        pending.clear();
        for done in flushed {
            let _ = done.try_send(());
        }
    }
}

/// Who writes, on every JSON line.
#[derive(Clone, Debug, Default)]
pub(crate) struct Identity {
    pub(crate) service: String,
    pub(crate) instance: String,
}

/// Turns tracing events into lines.
pub(crate) struct LogLayer {
    writer: LogWriter,
    format: LogFormat,
    identity: Identity,
}

impl LogLayer {
    pub(crate) fn new(writer: LogWriter, format: LogFormat, identity: Identity) -> Self {
        Self { writer, format, identity }
    }

    fn json_line(&self, event: &Event<'_>, fields: Fields, trace: Option<(String, String)>) -> String {
        let metadata = event.metadata();
        let mut line = Map::new();
        line.insert("event".to_owned(), Value::String(fields.event));
        line.insert("level".to_owned(), Value::String(level_name(*metadata.level()).to_owned()));
        line.insert("timestamp".to_owned(), Value::String(iso_utc(SystemTime::now())));
        line.insert("logger".to_owned(), Value::String(logger_name(metadata.target())));
        if let Some((trace_id, span_id)) = trace {
            line.insert("trace_id".to_owned(), Value::String(trace_id));
            line.insert("span_id".to_owned(), Value::String(span_id));
        }
        for (name, value) in fields.values {
            // The keys above belong to the schema; an event cannot overwrite them, except for a trace it names itself.
            line.entry(name).or_insert(value);
        }
        line.entry("service").or_insert_with(|| Value::String(self.identity.service.clone()));
        if !self.identity.instance.is_empty() {
            line.entry("instance").or_insert_with(|| Value::String(self.identity.instance.clone()));
        }
        Value::Object(line).to_string()
    }
}

fn console_line(event: &Event<'_>, fields: &Fields) -> String {
    use fmt::Write as _;
    let metadata = event.metadata();
    let time = iso_utc(SystemTime::now());
    let level = level_name(*metadata.level());
    let mut line = format!("{time} [{level:<8}] {:<30} [{}]", fields.event, logger_name(metadata.target()));
    for (name, value) in &fields.values {
        // Writing to a string cannot fail.
        let _ = match value {
            Value::String(text) if !text.contains([' ', '"', '\n', '=']) => write!(line, " {name}={text}"),
            other => write!(line, " {name}={other}"),
        };
    }
    line
}

impl<S> Layer<S> for LogLayer
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        if fields.event.is_empty() {
            fields.event = event.metadata().name().to_owned();
        }
        let line = match self.format {
            LogFormat::Console => console_line(event, &fields),
            _ => {
                let place = context.event_span(event).as_ref().and_then(place_of);
                let trace = place.map(|place| (place.trace_id_hex(), format!("{:016x}", place.span_id)));
                self.json_line(event, fields, trace)
            }
        };
        self.writer.write(line);
    }
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        // Python has no trace level.
        Level::DEBUG | Level::TRACE => "debug",
    }
}

/// Rust's module path as a Python logger's name: `kvist_router::service` becomes `kvist_router.service`.
fn logger_name(target: &str) -> String {
    target.replace("::", ".")
}

#[derive(Default)]
struct Fields {
    event: String,
    values: Vec<(String, Value)>,
}

impl Fields {
    fn push(&mut self, field: &Field, value: impl Into<Value>) {
        self.values.push((field.name().to_owned(), value.into()));
    }
}

impl Visit for Fields {
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.push(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.push(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.push(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.event);
        } else {
            self.push(field, value);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}
