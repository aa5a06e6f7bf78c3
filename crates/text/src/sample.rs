//! Small tokenizers with ChatML, for tests.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use crate::{ModelText, TextHeader};

static BYTE_LEVEL: LazyLock<ModelText> = LazyLock::new(|| load(&byte_level(), CHATML));
static BYTE_FALLBACK: LazyLock<ModelText> = LazyLock::new(|| load(&byte_fallback(), CHATML));

pub(crate) const CHATML: &str = "{% for message in messages %}{% if message.role == 'alien' %}{{ raise_exception('unknown role') }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// A byte-level tokenizer as GPT-2 has it: each byte's token is its value.
pub(crate) fn model() -> &'static ModelText {
    &BYTE_LEVEL
}

/// A sentencepiece tokenizer as Llama 2 has it: token `<0xNN>` of each byte is its value.
pub(crate) fn fallback_model() -> &'static ModelText {
    &BYTE_FALLBACK
}

pub(crate) fn load(tokenizer: &Value, chat_template: &str) -> ModelText {
    let header = TextHeader {
        chat_template: chat_template.to_owned(),
        eos_token: "<|im_end|>".to_owned(),
        ..TextHeader::default()
    };
    ModelText::load(tokenizer.to_string().as_bytes(), header).unwrap()
}

fn added(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "special": true, "normalized": false,
        "single_word": false, "lstrip": false, "rstrip": false})
}

/// The control tokens, behind the vocabulary.
fn controls(vocabulary: &Map<String, Value>) -> Value {
    let next = u32::try_from(vocabulary.len()).unwrap();
    json!([added(next, "<|im_start|>"), added(next + 1, "<|im_end|>")])
}

/// The character of each byte.
fn alphabet() -> Vec<char> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 256;
    (0u8..=255)
        .map(|byte| {
            if printable(byte) {
                char::from(byte)
            } else {
                next += 1;
                char::from_u32(next - 1).unwrap()
            }
        })
        .collect()
}

pub(crate) fn byte_level() -> Value {
    let mut vocabulary: Map<String, Value> =
        alphabet().into_iter().enumerate().map(|(id, character)| (character.to_string(), id.into())).collect();
    let merges = ["h e", "l l", "he ll", "hell o", "\u{120} h", "Ã ©", "ð Ł", "ðŁ ĺ", "Ċ Ċ", "i m"];
    for merge in merges {
        vocabulary.insert(merge.replace(' ', ""), vocabulary.len().into());
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": controls(&vocabulary), "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary,
            "merges": merges},
    })
}

pub(crate) fn byte_fallback() -> Value {
    let mut vocabulary: Map<String, Value> = (0..256u32).map(|byte| (format!("<0x{byte:02X}>"), byte.into())).collect();
    for character in "▁abcdehlox<>|".chars() {
        vocabulary.insert(character.to_string(), vocabulary.len().into());
    }
    let merges = ["h e", "l l", "▁ a", "▁ ▁"];
    for merge in merges {
        vocabulary.insert(merge.replace(' ', ""), vocabulary.len().into());
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": controls(&vocabulary),
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocabulary,
            "merges": merges},
    })
}
