//! Tracing's spans as OpenTelemetry spans.
//!
//! Some fields of a span are for this layer alone: `traceparent` names the remote parent, `otel.kind` the span kind
//! (`server`, `client`, …), `otel.name` replaces the name of the call site, `otel.start_unix_nanos` and
//! `otel.end_unix_nanos` place a span that is told of after it has happened, and `otel.status_description`, recorded
//! later, makes the span an error. Everything else becomes an attribute of the same name.

use std::{
    borrow::Cow,
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use opentelemetry::{
    Array, Context, KeyValue, StringValue, Value,
    trace::{Span as _, SpanBuilder, SpanKind, Status, TraceContextExt as _, Tracer as _},
};
use opentelemetry_sdk::trace::{SdkTracer, Span as SdkSpan};
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{
    Layer, Registry,
    layer::Context as LayerContext,
    registry::{LookupSpan, SpanRef},
};

use crate::{
    names,
    traceparent::{TraceParent, parse_traceparent},
};

const TRACEPARENT: &str = "traceparent";
const KIND: &str = "otel.kind";
const NAME: &str = "otel.name";
const START: &str = "otel.start_unix_nanos";
const END: &str = "otel.end_unix_nanos";
const STATUS_DESCRIPTION: &str = "otel.status_description";

/// Turns spans into OpenTelemetry spans.
pub(crate) struct SpanLayer {
    tracer: SdkTracer,
}

impl SpanLayer {
    pub(crate) fn new(tracer: SdkTracer) -> Self {
        Self { tracer }
    }
}

/// What a span of tracing carries while it is open.
struct Recording {
    span: SdkSpan,
    place: Option<TraceParent>,
    /// When it ended; none for a span that ends when it is closed.
    end: Option<SystemTime>,
}

impl<S> Layer<S> for SpanLayer
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: LayerContext<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let parent = match fields.traceparent.as_deref().and_then(parse_traceparent) {
            Some(remote) => Some(remote),
            None => span.parent().as_ref().and_then(place_of),
        };
        let parent_context = parent
            .map_or_else(Context::new, |parent| Context::new().with_remote_span_context(parent.to_span_context()));
        let name = fields.name.take().map_or_else(|| attributes.metadata().name().into(), Cow::Owned);
        let mut builder = SpanBuilder::from_name(name)
            .with_kind(fields.kind.take().unwrap_or(SpanKind::Internal))
            .with_attributes(std::mem::take(&mut fields.attributes));
        builder.start_time = fields.start;
        let otel_span = self.tracer.build_with_context(builder, &parent_context);
        let place = TraceParent::from_span_context(otel_span.span_context());
        let mut recording = Recording { span: otel_span, place, end: fields.end };
        fields.finish(&mut recording.span);
        span.extensions_mut().insert(recording);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: LayerContext<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut extensions = span.extensions_mut();
        let Some(recording) = extensions.get_mut::<Recording>() else { return };
        let mut fields = Fields::default();
        values.record(&mut fields);
        fields.finish(&mut recording.span);
    }

    fn on_event(&self, event: &Event<'_>, context: LayerContext<'_, S>) {
        let Some(span) = context.event_span(event) else { return };
        let mut extensions = span.extensions_mut();
        let Some(recording) = extensions.get_mut::<Recording>() else { return };
        let mut fields = Fields::default();
        event.record(&mut fields);
        let name = fields.message.take().unwrap_or_else(|| event.metadata().name().to_owned());
        recording.span.add_event(name, std::mem::take(&mut fields.attributes));
    }

    fn on_close(&self, id: Id, context: LayerContext<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        if let Some(mut recording) = span.extensions_mut().remove::<Recording>() {
            match recording.end {
                Some(end) => recording.span.end_with_timestamp(end),
                None => recording.span.end(),
            }
        }
    }
}

/// Place of a span in its trace; none while no exporter is configured.
pub(crate) fn place_of<S>(span: &SpanRef<'_, S>) -> Option<TraceParent>
where
    S: for<'lookup> LookupSpan<'lookup>,
{
    span.extensions().get::<Recording>().and_then(|recording| recording.place)
}

/// Place of an open span in its trace, to be sent to whoever works for it. None while no exporter is configured.
#[must_use]
pub fn span_traceparent(span: &tracing::Span) -> Option<TraceParent> {
    span.with_subscriber(|(id, dispatch)| place_of(&dispatch.downcast_ref::<Registry>()?.span(id)?))?
}

/// The `traceparent` to send on: the span's own place, else what came in, so that a Kvist without an exporter does not
/// cut the traces that pass through it.
#[must_use]
pub fn propagate(span: &tracing::Span, inbound: Option<&str>) -> Option<String> {
    match span_traceparent(span) {
        Some(place) => Some(place.header()),
        None => inbound.and_then(parse_traceparent).map(|parent| parent.header()),
    }
}

/// Marks a span as failed. The span must have been made with a field `otel.status_description`.
pub fn set_status_error(span: &tracing::Span, description: &str) {
    span.record(STATUS_DESCRIPTION, description);
}

#[derive(Default)]
struct Fields {
    attributes: Vec<KeyValue>,
    traceparent: Option<String>,
    kind: Option<SpanKind>,
    name: Option<String>,
    start: Option<SystemTime>,
    end: Option<SystemTime>,
    error: Option<String>,
    message: Option<String>,
}

impl Fields {
    fn finish(self, span: &mut SdkSpan) {
        span.set_attributes(self.attributes);
        if let Some(description) = self.error {
            span.set_status(Status::error(description));
        }
    }

    fn push(&mut self, field: &Field, value: impl Into<Value>) {
        self.attributes.push(KeyValue::new(field.name(), value));
    }
}

impl Visit for Fields {
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            START => self.start = UNIX_EPOCH.checked_add(Duration::from_nanos(value)),
            END => self.end = UNIX_EPOCH.checked_add(Duration::from_nanos(value)),
            _ => self.push(field, i64::try_from(value).unwrap_or(i64::MAX)),
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.push(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.push(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            TRACEPARENT => self.traceparent = Some(value.to_owned()),
            STATUS_DESCRIPTION => self.error = Some(value.to_owned()),
            "message" => self.message = Some(value.to_owned()),
            NAME => self.name = Some(value.to_owned()),
            // The convention wants an array, one reason for each choice; tracing has no arrays.
            names::FINISH_REASONS => {
                self.push(field, Value::Array(Array::String(vec![StringValue::from(value.to_owned())])));
            }
            KIND => {
                self.kind = match value {
                    "server" => Some(SpanKind::Server),
                    "client" => Some(SpanKind::Client),
                    "producer" => Some(SpanKind::Producer),
                    "consumer" => Some(SpanKind::Consumer),
                    _ => None,
                }
            }
            _ => self.push(field, value.to_owned()),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}
