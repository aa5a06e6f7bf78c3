//! The server span of a request.

/// Makes the span of a request that has just come in, below the caller's `traceparent`.
///
/// The doors differ in how they are asked and answered, which are the fields given here; what a request is and how it
/// ends is recorded for all of them in one place, so the fields for it are declared once.
#[macro_export]
macro_rules! request_span {
    ($name:expr, $traceparent:expr, $({ $field:expr } = $value:expr),+ $(,)?) => {
        ::tracing::info_span!(
            target: "kvist.request",
            parent: None,
            $name,
            traceparent = $traceparent,
            otel.kind = "server",
            otel.status_description = ::tracing::field::Empty,
            $({ $field } = $value,)+
            { $crate::names::PROVIDER } = "kvist",
            { $crate::names::OPERATION } = ::tracing::field::Empty,
            { $crate::names::MODEL } = ::tracing::field::Empty,
            { $crate::names::MAX_TOKENS } = ::tracing::field::Empty,
            { $crate::names::TEMPERATURE } = ::tracing::field::Empty,
            { $crate::names::TOP_P } = ::tracing::field::Empty,
            { $crate::names::FINISH_REASONS } = ::tracing::field::Empty,
            { $crate::names::TIME_TO_FIRST_CHUNK } = ::tracing::field::Empty,
            { $crate::names::PROMPT_TOKENS } = ::tracing::field::Empty,
            { $crate::names::COMPLETION_TOKENS } = ::tracing::field::Empty,
            { $crate::names::CACHED_TOKENS } = ::tracing::field::Empty,
            { $crate::names::REQUEST_ID } = ::tracing::field::Empty,
            { $crate::names::OUTCOME } = ::tracing::field::Empty,
            { $crate::names::ERROR_TYPE } = ::tracing::field::Empty,
        )
    };
}
