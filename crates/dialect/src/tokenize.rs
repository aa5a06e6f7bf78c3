//! Tokens to look at: `/tokenize` and `/detokenize`, as vLLM's server has them.

use bytes::{BufMut as _, BytesMut};
use kvist_errors::KvistError;
use serde_json::Value;

use crate::{
    fields::{Fields, read_model, read_token_ids, unsupported, wrong},
    input::PromptForm,
    json::{write_display, write_list, write_number},
    openai::read_conversation,
};

/// A request for the tokens of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizeInput {
    /// Name of the model.
    pub model: String,
    /// Text, or messages to which the model's template is applied.
    pub prompt: PromptForm,
    /// Whether the template opens an answer at the end.
    pub add_generation_prompt: bool,
}

/// A request for the text of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeInput {
    /// Name of the model.
    pub model: String,
    /// The tokens.
    pub token_ids: Vec<u32>,
}

/// Reads a body of `/tokenize`: `prompt`, or `messages` with `tools`, `add_generation_prompt` and
/// `chat_template_kwargs`.
///
/// # Errors
/// The body is wrong, or a field cannot be honored; the error names it.
pub fn parse_tokenize(body: &[u8]) -> Result<TokenizeInput, KvistError> {
    let mut fields = Fields::parse(body)?;
    let prompt = match fields.take("prompt") {
        Some(Value::String(text)) => PromptForm::Text(text),
        Some(_) => return Err(wrong("prompt", "must be a string")),
        None => read_conversation(&mut fields)?.0,
    };
    let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    if fields.boolean("add_special_tokens")? == Some(matches!(prompt, PromptForm::Chat { .. })) {
        return Err(unsupported("add_special_tokens", "prompts get them, conversations have them from the template"));
    }
    if fields.boolean("return_token_strs")?.unwrap_or(false) {
        return Err(unsupported("return_token_strs", "ask `/detokenize` for the text of tokens"));
    }
    let model = read_model(&mut fields)?;
    refuse_others(&fields)?;
    Ok(TokenizeInput { model, prompt, add_generation_prompt })
}

/// Reads a body of `/detokenize`.
///
/// # Errors
/// The body is wrong, or a field cannot be honored; the error names it.
pub fn parse_detokenize(body: &[u8]) -> Result<DetokenizeInput, KvistError> {
    let mut fields = Fields::parse(body)?;
    let tokens = fields.take("tokens").ok_or_else(|| wrong("tokens", "is missing"))?;
    let token_ids = read_token_ids("tokens", &tokens)?;
    let model = read_model(&mut fields)?;
    refuse_others(&fields)?;
    Ok(DetokenizeInput { model, token_ids })
}

fn refuse_others(fields: &Fields) -> Result<(), KvistError> {
    match fields.map.iter().find(|(_, value)| !value.is_null()) {
        Some((name, _)) => Err(unsupported(name, "this endpoint does not know it")),
        None => Ok(()),
    }
}

/// Writes the answer of `/tokenize`.
pub fn write_tokens(out: &mut BytesMut, token_ids: &[u32], context_tokens: u32) {
    write_display(out, format_args!("{{\"count\":{},\"max_model_len\":{context_tokens},\"tokens\":[", token_ids.len()));
    write_list(out, token_ids, |out, id| write_number(out, *id));
    out.put_slice(b"]}");
}

#[cfg(test)]
mod tests {
    use kvist_errors::Code;
    use serde_json::json;

    use super::*;

    #[test]
    fn text_or_a_conversation_is_tokenized() {
        let text = parse_tokenize(br#"{"model": "m", "prompt": "p", "add_special_tokens": true}"#).unwrap();
        assert_eq!(("m", PromptForm::Text("p".to_owned())), (text.model.as_str(), text.prompt));
        let body = br#"{"model": "m", "messages": [{"role": "user", "content": "q"}], "add_generation_prompt": false}"#;
        let chat = parse_tokenize(body).unwrap();
        assert!(!chat.add_generation_prompt);
        let PromptForm::Chat { messages, .. } = chat.prompt else { panic!() };
        assert_eq!(vec![json!({"role": "user", "content": "q"})], messages);
    }

    #[test]
    fn what_cannot_be_honored_is_named() {
        for (body, code, field) in [
            (r#"{"model": "m"}"#, Code::InvalidArgument, "messages"),
            (r#"{"prompt": "p"}"#, Code::InvalidArgument, "model"),
            (r#"{"model": "m", "prompt": 7}"#, Code::InvalidArgument, "prompt"),
            (
                r#"{"model": "m", "prompt": "p", "add_special_tokens": false}"#,
                Code::UnsupportedField,
                "add_special_tokens",
            ),
            (
                r#"{"model": "m", "prompt": "p", "return_token_strs": true}"#,
                Code::UnsupportedField,
                "return_token_strs",
            ),
            (r#"{"model": "m", "prompt": "p", "other": 1}"#, Code::UnsupportedField, "other"),
        ] {
            let error = parse_tokenize(body.as_bytes()).unwrap_err();
            assert_eq!((code, field), (error.code, error.fields[0].field.as_str()), "{body}");
        }
        for (body, field) in [(r#"{"model": "m"}"#, "tokens"), (r#"{"model": "m", "tokens": [-1]}"#, "tokens[0]")] {
            assert_eq!(field, parse_detokenize(body.as_bytes()).unwrap_err().fields[0].field);
        }
        let input = parse_detokenize(br#"{"model": "m", "tokens": [1, 2]}"#).unwrap();
        assert_eq!(vec![1, 2], input.token_ids);
    }

    #[test]
    fn tokens_are_counted() {
        let mut out = BytesMut::new();
        write_tokens(&mut out, &[7, 812], 4096);
        let answer: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(json!({"count": 2, "max_model_len": 4096, "tokens": [7, 812]}), answer);
    }
}
