//! The embeddings API of OpenAI.

use crate::{
    fields::{Fields, read_model, refuse_mesh_fields, unsupported, wrong},
    input::PromptForm,
    json::{write_display, write_list, write_string},
    openai::prompts::take_prompts,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::{BufMut as _, BytesMut};
use kvist_errors::KvistError;

/// Most inputs of a request, as at OpenAI.
const MOST_INPUTS: usize = 2048;

/// How the numbers of an embedding are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmbeddingEncoding {
    /// A list of numbers.
    Float,
    /// Their bytes, 4 for each number and the lowest first, in base64.
    Base64,
}

/// A request for embeddings.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingsInput {
    /// Name of the model.
    pub model: String,
    /// Texts or tokens, one for each embedding.
    pub inputs: Vec<PromptForm>,
    /// How they are written.
    pub encoding: EmbeddingEncoding,
}

/// Reads a body of `/v1/embeddings`.
///
/// # Errors
/// The body is wrong, or a field cannot be honored; the error names it.
pub fn parse_embeddings(body: &[u8]) -> Result<EmbeddingsInput, KvistError> {
    let mut fields = Fields::parse(body)?;
    refuse_mesh_fields(&fields)?;
    let inputs = take_prompts(&mut fields, "input", MOST_INPUTS, false)?;
    let encoding = match fields.text("encoding_format")?.as_deref() {
        None | Some("float") => EmbeddingEncoding::Float,
        Some("base64") => EmbeddingEncoding::Base64,
        Some(_) => return Err(wrong("encoding_format", "must be float or base64")),
    };
    if fields.take("dimensions").is_some() {
        // A vector may be cut only where the model was trained for it, and nothing says so.
        return Err(unsupported("dimensions", "embeddings have the length that the model gives them"));
    }
    let model = read_model(&mut fields)?;
    // Names the end user for statistics that are not kept.
    let _ = fields.text("user")?;
    if let Some((name, _)) = fields.map.iter().find(|(_, value)| !value.is_null()) {
        return Err(unsupported(name, "this endpoint does not know it"));
    }
    Ok(EmbeddingsInput { model, inputs, encoding })
}

/// Writes the answer of `/v1/embeddings`.
pub fn write_embeddings(
    out: &mut BytesMut,
    model: &str,
    embeddings: &[&[f32]],
    encoding: EmbeddingEncoding,
    prompt_tokens: u32,
) {
    out.put_slice(b"{\"object\":\"list\",\"data\":[");
    let mut index = 0_usize;
    write_list(out, embeddings, |out, values| {
        write_display(out, format_args!("{{\"object\":\"embedding\",\"index\":{index},\"embedding\":"));
        index += 1;
        match encoding {
            EmbeddingEncoding::Float => {
                out.put_u8(b'[');
                write_list(out, values, |out, value| write_value(out, *value));
                out.put_u8(b']');
            }
            EmbeddingEncoding::Base64 => {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                write_string(out, &STANDARD.encode(bytes));
            }
        }
        out.put_u8(b'}');
    });
    out.put_slice(b"],\"model\":");
    write_string(out, model);
    let usage = format_args!(",\"usage\":{{\"prompt_tokens\":{prompt_tokens},\"total_tokens\":{prompt_tokens}}}}}");
    write_display(out, usage);
}

/// The shortest digits that mean the same number. JSON has no word for what is none.
fn write_value(out: &mut BytesMut, value: f32) {
    if value.is_finite() {
        write_display(out, format_args!("{value:e}"));
    } else {
        out.put_slice(b"null");
    }
}

#[cfg(test)]
mod tests {
    use kvist_errors::Code;
    use serde_json::{Value, json};

    use super::*;

    fn parse(input: &str, more: &str) -> Result<EmbeddingsInput, KvistError> {
        parse_embeddings(format!(r#"{{"model": "m", "input": {input}{more}}}"#).as_bytes())
    }

    #[test]
    fn inputs_come_in_four_forms() {
        let text = |text: &str| PromptForm::Text(text.to_owned());
        for (input, expected) in [
            (r#""a""#, vec![text("a")]),
            (r#"["a", "b"]"#, vec![text("a"), text("b")]),
            ("[1, 2]", vec![PromptForm::Tokens(vec![1, 2])]),
            ("[[1, 2], [3]]", vec![PromptForm::Tokens(vec![1, 2]), PromptForm::Tokens(vec![3])]),
        ] {
            let parsed = parse(input, r#", "user": "u", "unused": null"#).unwrap();
            assert_eq!(("m", expected), (parsed.model.as_str(), parsed.inputs), "{input}");
            assert_eq!(EmbeddingEncoding::Float, parsed.encoding);
        }
        let base64 = parse(r#""a""#, r#", "encoding_format": "base64""#).unwrap();
        assert_eq!(EmbeddingEncoding::Base64, base64.encoding);
    }

    #[test]
    fn what_cannot_be_honored_is_named() {
        let many = format!("[{}]", vec![r#""a""#; MOST_INPUTS + 1].join(","));
        for (input, more, code, field) in [
            (r#""""#, "", Code::InvalidArgument, "input"),
            ("[]", "", Code::InvalidArgument, "input"),
            (r#"["a", ""]"#, "", Code::InvalidArgument, "input[1]"),
            ("[[1], []]", "", Code::InvalidArgument, "input[1]"),
            ("[1, -2]", "", Code::InvalidArgument, "input[1]"),
            (r#"[[1], [2, "x"]]"#, "", Code::InvalidArgument, "input[1][1]"),
            (r#"["a", 1]"#, "", Code::InvalidArgument, "input[1]"),
            (many.as_str(), "", Code::InvalidArgument, "input"),
            ("7", "", Code::InvalidArgument, "input"),
            (r#""a""#, r#", "encoding_format": "int8""#, Code::InvalidArgument, "encoding_format"),
            (r#""a""#, r#", "dimensions": 8"#, Code::UnsupportedField, "dimensions"),
            (r#""a""#, r#", "kv_hints": {}"#, Code::MeshOnlyField, "kv_hints"),
            (r#""a""#, r#", "truncate": true"#, Code::UnsupportedField, "truncate"),
        ] {
            let error = parse(input, more).unwrap_err();
            assert_eq!((code, field), (error.code, error.fields[0].field.as_str()), "{more}");
        }
    }

    #[test]
    fn numbers_are_exact_in_both_encodings() {
        let values = [0.1_f32, -1.0, 1e-40, 3.402_823_5e38, 0.0];
        let written = |encoding| {
            let mut out = BytesMut::new();
            write_embeddings(&mut out, "m", &[&values, &[0.5]], encoding, 7);
            serde_json::from_slice::<Value>(&out).unwrap()
        };
        let floats = written(EmbeddingEncoding::Float);
        assert_eq!(json!({"prompt_tokens": 7, "total_tokens": 7}), floats["usage"]);
        assert_eq!((json!("m"), json!(1)), (floats["model"].clone(), floats["data"][1]["index"].clone()));
        #[expect(clippy::cast_possible_truncation, reason = "they were single precision before")]
        let read = |value: &Value| value.as_f64().unwrap() as f32;
        let read: Vec<f32> = floats["data"][0]["embedding"].as_array().unwrap().iter().map(read).collect();
        assert_eq!(values.as_slice(), read);
        let base64 = written(EmbeddingEncoding::Base64);
        let bytes = STANDARD.decode(base64["data"][0]["embedding"].as_str().unwrap()).unwrap();
        let read: Vec<f32> = bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
        assert_eq!(values.as_slice(), read);
    }
}
