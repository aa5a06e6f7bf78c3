//! Small translations between messages and the words of the crates.

use kvist_index::SourceState;
use kvist_proto::events::v1;
use prost_types::{Struct, value::Kind};

pub(crate) fn timestamp(unix_nanos: u64) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: i64::try_from(unix_nanos / 1_000_000_000).unwrap_or(i64::MAX),
        nanos: i32::try_from(unix_nanos % 1_000_000_000).unwrap_or(0),
    }
}

pub(crate) fn state(state: SourceState) -> v1::SourceState {
    match state {
        SourceState::Exact => v1::SourceState::Exact,
        SourceState::CatchingUp => v1::SourceState::CatchingUp,
        SourceState::Partial => v1::SourceState::Partial,
        SourceState::Truncated => v1::SourceState::Truncated,
        SourceState::Stale => v1::SourceState::Stale,
    }
}

pub(crate) fn json_of(value: &prost_types::Value) -> serde_json::Value {
    match &value.kind {
        None | Some(Kind::NullValue(_)) => serde_json::Value::Null,
        // Struct has doubles alone; whole numbers are written as such.
        #[expect(clippy::cast_possible_truncation, reason = "checked to be whole and in range")]
        Some(Kind::NumberValue(number)) if number.fract() == 0.0 && number.abs() < 9e15 => (*number as i64).into(),
        Some(Kind::NumberValue(number)) => (*number).into(),
        Some(Kind::StringValue(text)) => text.as_str().into(),
        Some(Kind::BoolValue(boolean)) => (*boolean).into(),
        Some(Kind::StructValue(fields)) => json_map(fields).into(),
        Some(Kind::ListValue(list)) => list.values.iter().map(json_of).collect(),
    }
}

pub(crate) fn json_map(fields: &Struct) -> serde_json::Map<String, serde_json::Value> {
    fields.fields.iter().map(|(key, value)| (key.clone(), json_of(value))).collect()
}
