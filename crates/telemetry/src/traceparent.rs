//! W3C trace context in one header.

use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

/// A place in a trace, as the header `traceparent` carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace; never zero.
    pub trace_id: u128,
    /// The span; never zero.
    pub span_id: u64,
    /// Whether the caller records the trace.
    pub sampled: bool,
}

impl TraceParent {
    /// The header's value, version 00.
    #[must_use]
    pub fn header(&self) -> String {
        format!("00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, u8::from(self.sampled))
    }

    /// Trace id as 32 lower-case hex digits.
    #[must_use]
    pub fn trace_id_hex(&self) -> String {
        format!("{:032x}", self.trace_id)
    }

    pub(crate) fn to_span_context(self) -> SpanContext {
        let flags = if self.sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
        let (trace_id, span_id) =
            (TraceId::from_bytes(self.trace_id.to_be_bytes()), SpanId::from_bytes(self.span_id.to_be_bytes()));
        SpanContext::new(trace_id, span_id, flags, true, TraceState::default())
    }

    pub(crate) fn from_span_context(context: &SpanContext) -> Option<Self> {
        context.is_valid().then(|| Self {
            trace_id: u128::from_be_bytes(context.trace_id().to_bytes()),
            span_id: u64::from_be_bytes(context.span_id().to_bytes()),
            sampled: context.is_sampled(),
        })
    }
}

/// Reads a `traceparent` header. None for anything that the standard tells receivers to ignore: the caller then
/// starts a trace of its own.
#[must_use]
pub fn parse_traceparent(header: &str) -> Option<TraceParent> {
    let mut parts = header.trim().split('-');
    let (version, trace_id, span_id, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let lengths = (version.len(), trace_id.len(), span_id.len(), flags.len());
    // A later version may append parts; version 00 may not.
    if lengths != (2, 32, 16, 2) || version == "ff" || (version == "00" && parts.next().is_some()) {
        return None;
    }
    let is_lower_hex = |text: &str| text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if ![version, trace_id, span_id, flags].into_iter().all(is_lower_hex) {
        return None;
    }
    let parent = TraceParent {
        trace_id: u128::from_str_radix(trace_id, 16).ok()?,
        span_id: u64::from_str_radix(span_id, 16).ok()?,
        sampled: u8::from_str_radix(flags, 16).ok()? & 1 == 1,
    };
    (parent.trace_id != 0 && parent.span_id != 0).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_header_survives_the_way_through_a_span_context() {
        let parent = parse_traceparent(HEADER).unwrap();
        assert_eq!(HEADER, parent.header());
        assert_eq!(Some(parent), TraceParent::from_span_context(&parent.to_span_context()));
        assert_eq!("4bf92f3577b34da6a3ce929d0e0e4736", parent.trace_id_hex());
    }

    #[test]
    fn what_the_standard_calls_invalid_is_ignored() {
        for header in [
            "",
            "00",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-600f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-ébf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
        ] {
            assert_eq!(None, parse_traceparent(header), "{header}");
        }
        let later = parse_traceparent("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00-more");
        assert_eq!(Some(false), later.map(|parent| parent.sampled));
    }
}
