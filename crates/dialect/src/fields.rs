//! Reading the fields of a JSON body, with errors that name them.

use kvist_errors::{Code, KvistError};
use serde_json::{Map, Value};

/// Fields by which only the mesh steers engines.
const MESH_ONLY: [&str; 5] =
    ["kv_transfer_params", "ec_transfer_params", "kv_hints", "kv_event_report_mode", "vllm_xargs"];

/// Longest text in `stop`: as much text as a stream may have to hold back.
pub(crate) const LONGEST_STOP_BYTES: usize = 1024;

/// Stands for a `top_p` of 0.
pub(crate) const SMALLEST_TOP_P: f32 = 1e-6;

/// Most items of lists that cost something for each one, in all APIs.
const MOST_ITEMS: [(&str, usize); 2] = [("messages", 10_000), ("tools", 1_024)];

/// Most texts in `stop`.
const MOST_STOPS: usize = 16;

/// Takes known fields out of a body; what stays is unknown.
pub(crate) struct Fields {
    pub(crate) map: Map<String, Value>,
}

impl Fields {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, KvistError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => {
                let fields = Self { map };
                fields.check_lengths()?;
                Ok(fields)
            }
            Ok(_) => Err(KvistError::new(Code::InvalidArgument, "the body must be a JSON object")),
            Err(error) => {
                let why = error.to_string();
                // The reader's own words, without the place, which they end with.
                let why = why.rsplit_once(" at line ").map_or(why.as_str(), |(why, _)| why);
                let (line, column) = (error.line(), error.column());
                let message = format!("the body is not JSON: line {line}, column {column}: {why}");
                Err(KvistError::new(Code::InvalidArgument, message))
            }
        }
    }

    fn check_lengths(&self) -> Result<(), KvistError> {
        for (name, most) in MOST_ITEMS {
            let items = self.map.get(name).and_then(Value::as_array).map_or(0, Vec::len);
            if items > most {
                return Err(wrong(name, format!("may have at most {most} items")));
            }
        }
        Ok(())
    }

    /// The value of a field; null counts as absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.map.shift_remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn number(&mut self, name: &str, low: f64, high: f64) -> Result<Option<f32>, KvistError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64() {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "sampling parameters are single precision in every engine"
            )]
            Some(number) if (low..=high).contains(&number) => Ok(Some(number as f32)),
            _ => Err(wrong(name, format!("must be a number from {low} to {high}"))),
        }
    }

    pub(crate) fn unsigned(&mut self, name: &str, low: u32, high: u32) -> Result<Option<u32>, KvistError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_u64().and_then(|number| u32::try_from(number).ok()) {
            Some(number) if (low..=high).contains(&number) => Ok(Some(number)),
            _ if high == u32::MAX => Err(wrong(name, format!("must be a whole number of at least {low}"))),
            _ => Err(wrong(name, format!("must be a whole number from {low} to {high}"))),
        }
    }

    pub(crate) fn signed(&mut self, name: &str) -> Result<Option<i64>, KvistError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        value.as_i64().map(Some).ok_or_else(|| wrong(name, "must be a whole number"))
    }

    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>, KvistError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| wrong(name, "must be true or false"))
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, KvistError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(wrong(name, "must be a string")),
        }
    }

    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, KvistError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(_) => Err(wrong(name, "must be an object")),
        }
    }

    /// What stays, without the fields that may be left without effect and those that say nothing.
    pub(crate) fn into_extras(mut self, without_effect: &[&str]) -> Map<String, Value> {
        self.map.retain(|name, value| !value.is_null() && !without_effect.contains(&name.as_str()));
        self.map
    }
}

pub(crate) fn wrong(field: impl Into<String>, why: impl Into<String>) -> KvistError {
    KvistError::field(Code::InvalidArgument, field, why)
}

pub(crate) fn unsupported(field: impl Into<String>, why: impl Into<String>) -> KvistError {
    KvistError::field(Code::UnsupportedField, field, why)
}

/// Refuses what only the mesh may set.
pub(crate) fn refuse_mesh_fields(fields: &Fields) -> Result<(), KvistError> {
    match MESH_ONLY.into_iter().find(|field| fields.map.contains_key(*field)) {
        Some(field) => Err(KvistError::field(Code::MeshOnlyField, field, "only the mesh sets it")),
        None => Ok(()),
    }
}

/// Probability mass from which tokens are drawn.
pub(crate) fn read_top_p(fields: &mut Fields) -> Result<Option<f32>, KvistError> {
    // Clients write "only the most probable token" as 0, which engines refuse.
    Ok(fields.number("top_p", 0.0, 1.0)?.map(|top_p| top_p.max(SMALLEST_TOP_P)))
}

/// Most probable tokens from which one is drawn; engines and clients write "all" as 0 or -1.
pub(crate) fn read_top_k(fields: &mut Fields) -> Result<Option<u32>, KvistError> {
    match fields.take("top_k") {
        Some(value) if value.as_i64() == Some(-1) => Ok(Some(0)),
        Some(value) => match value.as_u64().and_then(|number| u32::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong("top_k", "must be a whole number, -1 for all")),
        },
        None => Ok(None),
    }
}

/// Smaller runs earlier.
pub(crate) fn read_priority(fields: &mut Fields) -> Result<i32, KvistError> {
    match fields.signed("priority")? {
        None => Ok(0),
        Some(priority) => i32::try_from(priority).map_err(|_| wrong("priority", "is out of range")),
    }
}

/// Texts that end generation. `name` is what the API calls them.
pub(crate) fn read_stop(fields: &mut Fields, name: &str) -> Result<Vec<String>, KvistError> {
    let stops = match fields.take(name) {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(items)) => items
            .into_iter()
            .enumerate()
            .map(|(position, item)| match item {
                Value::String(text) => Ok(text),
                _ => Err(wrong(format!("{name}[{position}]"), "must be a string")),
            })
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(wrong(name, "must be a string or a list of strings")),
    };
    if stops.len() > MOST_STOPS {
        return Err(wrong(name, format!("may have at most {MOST_STOPS} strings")));
    }
    if let Some(position) = stops.iter().position(|stop| stop.len() > LONGEST_STOP_BYTES) {
        return Err(wrong(format!("{name}[{position}]"), format!("may have at most {LONGEST_STOP_BYTES} bytes")));
    }
    Ok(stops.into_iter().filter(|stop| !stop.is_empty()).collect())
}

pub(crate) fn read_token_ids(field: &str, value: &Value) -> Result<Vec<u32>, KvistError> {
    let items = value.as_array().ok_or_else(|| wrong(field, "must be a list of token ids"))?;
    items
        .iter()
        .enumerate()
        .map(|(position, item)| {
            item.as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| wrong(format!("{field}[{position}]"), "must be a token id"))
        })
        .collect()
}

/// What has to be known of a request that goes on as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestHead {
    /// Name of the model.
    pub model: String,
    /// Answer as it comes.
    pub stream: bool,
}

/// Reads what a request is to be passed on by, and refuses what only the mesh may set.
///
/// # Errors
/// The body is no JSON object, or these fields are wrong.
pub fn parse_head(body: &[u8]) -> Result<RequestHead, KvistError> {
    let mut fields = Fields::parse(body)?;
    refuse_mesh_fields(&fields)?;
    let model = read_model(&mut fields)?;
    Ok(RequestHead { model, stream: fields.boolean("stream")?.unwrap_or(false) })
}

/// Name of the model.
pub(crate) fn read_model(fields: &mut Fields) -> Result<String, KvistError> {
    fields.text("model")?.filter(|model| !model.is_empty()).ok_or_else(|| wrong("model", "is missing"))
}

/// The messages of a conversation, at least one.
pub(crate) fn read_messages(fields: &mut Fields) -> Result<Vec<Value>, KvistError> {
    match fields.take("messages") {
        Some(Value::Array(messages)) if !messages.is_empty() => Ok(messages),
        Some(Value::Array(_)) => Err(wrong("messages", "must have at least one message")),
        Some(_) => Err(wrong("messages", "must be an array of messages")),
        None => Err(wrong("messages", "is missing")),
    }
}

/// The text of a part of a content. `kinds` is what the API calls text.
pub(crate) fn text_of_part<'a>(
    part: &'a Value,
    kinds: &[&str],
    path: impl Fn() -> String,
) -> Result<&'a str, KvistError> {
    match part.get("type").and_then(Value::as_str) {
        Some(kind) if kinds.contains(&kind) => {
            let text = part.get("text").and_then(Value::as_str);
            text.ok_or_else(|| wrong(format!("{}.text", path()), "must be a string"))
        }
        Some(kind) => {
            Err(unsupported(format!("{}.type", path()), format!("this model takes text alone, not `{kind}`")))
        }
        None => Err(wrong(format!("{}.type", path()), "is missing")),
    }
}

/// A JSON schema, as JSON text.
pub(crate) fn read_schema(path: &str, schema: Option<&Value>) -> Result<String, KvistError> {
    let schema = schema.filter(|schema| schema.is_object());
    schema.map(Value::to_string).ok_or_else(|| wrong(path, "must be an object"))
}
