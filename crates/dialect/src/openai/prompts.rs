//! What the older APIs take as a prompt: a text, token ids, or a list of these.

use kvist_errors::KvistError;
use serde_json::Value;

use crate::{
    fields::{Fields, read_token_ids, wrong},
    input::PromptForm,
};

/// Takes a field and reads it; at least one prompt, each with something in it where `may_be_empty` does not allow a text
/// without a character.
///
/// # Errors
/// The field is missing or wrong, or has more than `most` prompts; the error names the one.
pub(super) fn take_prompts(
    fields: &mut Fields,
    field: &str,
    most: usize,
    may_be_empty: bool,
) -> Result<Vec<PromptForm>, KvistError> {
    let prompts = match fields.take(field) {
        Some(Value::String(text)) => vec![PromptForm::Text(text)],
        Some(Value::Array(items)) => read_items(field, items, most)?,
        Some(_) => return Err(wrong(field, "must be a string, a list of token ids, or a list of these")),
        None => return Err(wrong(field, "is missing")),
    };
    let is_empty = |prompt: &PromptForm| match prompt {
        PromptForm::Text(text) => text.is_empty() && !may_be_empty,
        PromptForm::Tokens(ids) => ids.is_empty(),
        PromptForm::Chat { .. } => false,
    };
    if let Some(position) = prompts.iter().position(is_empty) {
        let place = if prompts.len() == 1 { field.to_owned() } else { format!("{field}[{position}]") };
        return Err(wrong(place, "must not be empty"));
    }
    Ok(prompts)
}

/// A list of texts, of token ids, or of lists of token ids.
fn read_items(field: &str, items: Vec<Value>, most: usize) -> Result<Vec<PromptForm>, KvistError> {
    if items.first().is_none_or(Value::is_number) {
        return Ok(vec![PromptForm::Tokens(read_token_ids(field, &Value::Array(items))?)]);
    }
    if items.len() > most {
        return Err(wrong(field, format!("may have at most {most} items")));
    }
    items
        .into_iter()
        .enumerate()
        .map(|(position, item)| match item {
            Value::String(text) => Ok(PromptForm::Text(text)),
            ids @ Value::Array(_) => Ok(PromptForm::Tokens(read_token_ids(&format!("{field}[{position}]"), &ids)?)),
            _ => Err(wrong(format!("{field}[{position}]"), "must be a string or a list of token ids")),
        })
        .collect()
}
