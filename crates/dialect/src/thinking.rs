//! How much a model shall think: what the APIs say, as variables of chat templates.

use kvist_errors::KvistError;
use serde_json::{Map, Value};

use crate::fields::wrong;

/// Words of the APIs for how much to think.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Names by which templates know whether to think: Qwen's, and DeepSeek's.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// Tells the template how much to think. What the request gives the template itself is left alone.
pub(crate) fn set_effort(
    path: &str,
    effort: Option<Value>,
    variables: &mut Map<String, Value>,
) -> Result<(), KvistError> {
    let Some(effort) = effort.filter(|effort| !effort.is_null()) else { return Ok(()) };
    let Some(word) = effort.as_str().filter(|word| EFFORTS.contains(word)) else {
        return Err(wrong(path, format!("must be one of {}", EFFORTS.join(", "))));
    };
    if word == "none" {
        set_thinking(false, variables);
    }
    variables.entry("reasoning_effort").or_insert(effort);
    Ok(())
}

/// Tells the template whether to think.
pub(crate) fn set_thinking(thinks: bool, variables: &mut Map<String, Value>) {
    for name in SWITCHES {
        variables.entry(name).or_insert(thinks.into());
    }
}
