//! The tokenizer of the simulated engine: bytes, and a few words that it speaks in.

use serde_json::{Map, Value, json};

use crate::TokenizerFile;

/// Two letters each, so that two merges make a word with its space, and text encodes to the tokens it was decoded from.
const WORDS: [&str; 32] = [
    "to", "of", "in", "is", "it", "we", "he", "as", "on", "at", "by", "or", "an", "so", "us", "my", "up", "me", "no",
    "go", "do", "if", "am", "be", "hi", "ox", "ax", "pi", "ad", "id", "ha", "oh",
];

/// The first of the words with a space before them, which are what the engine generates.
pub(super) const FIRST_WORD: u32 = 256;
/// How many there are.
pub(super) const WORD_COUNT: u32 = 32;
/// `<|im_start|>`, behind bytes, words with a space, and words without.
const IM_START: u32 = FIRST_WORD + 2 * WORD_COUNT;
const IM_END: u32 = IM_START + 1;
/// `<|endoftext|>`.
pub(super) const END_OF_TEXT: u32 = IM_START + 2;

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + \
                      '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ \
                      '<|im_start|>assistant\n' }}{% endif %}";

/// The tokenizer and template of the simulated engine.
#[must_use]
pub fn sim_tokenizer() -> TokenizerFile {
    TokenizerFile {
        json: tokenizer_json().to_string().into(),
        chat_template: CHATML.to_owned(),
        eos_token: "<|endoftext|>".to_owned(),
        eos_token_ids: vec![END_OF_TEXT, IM_END],
        ..TokenizerFile::default()
    }
}

/// Byte-level BPE in which each byte's token is its value.
fn tokenizer_json() -> Value {
    let mut vocabulary = Map::new();
    let mut next_unprintable = 256u32;
    for byte in 0u8..=255 {
        // GPT-2's table: what cannot be printed is written as a character from 256 on.
        let code = if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
            u32::from(byte)
        } else {
            next_unprintable += 1;
            next_unprintable - 1
        };
        vocabulary.insert(char::from_u32(code).unwrap_or('?').to_string(), u32::from(byte).into());
    }
    let mut merges = Vec::new();
    for (id, word) in (FIRST_WORD..).zip(WORDS) {
        vocabulary.insert(format!("\u{120}{word}"), id.into());
    }
    for (id, word) in (FIRST_WORD + WORD_COUNT..).zip(WORDS) {
        vocabulary.insert(word.to_owned(), id.into());
        merges.push(format!("{} {}", &word[..1], &word[1..]));
    }
    merges.extend(WORDS.iter().map(|word| format!("\u{120} {word}")));
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "normalized": false, "single_word": false,
            "lstrip": false, "rstrip": false})
    };
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [
            added(IM_START, "<|im_start|>"), added(IM_END, "<|im_end|>"), added(END_OF_TEXT, "<|endoftext|>"),
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary,
            "merges": merges},
    })
}

#[cfg(test)]
mod tests {
    use kvist_text::{Chat, ModelText, TextHeader};

    use super::*;

    fn model() -> ModelText {
        let file = sim_tokenizer();
        let header = TextHeader {
            chat_template: file.chat_template.clone(),
            eos_token: file.eos_token.clone(),
            eos_token_ids: file.eos_token_ids.clone(),
            ..TextHeader::default()
        };
        ModelText::load(&file.json, header).unwrap()
    }

    #[test]
    fn generated_tokens_are_words_and_come_back_as_the_same_tokens() {
        let model = model();
        assert!(model.is_fast());
        let ids: Vec<u32> = (0..200).map(|at| FIRST_WORD + at * 7 % WORD_COUNT).collect();
        let text = model.decode(&ids, true);
        assert!(text.starts_with(" to as us "), "{text}");
        assert!(text.bytes().all(|byte| byte == b' ' || byte.is_ascii_lowercase()));
        assert_eq!(ids, model.encode(&text, false).unwrap());
    }

    #[test]
    fn a_conversation_goes_on_where_the_engine_stopped() {
        let model = model();
        let chat = |turns: &[(&str, &str)], add_generation_prompt| Chat {
            messages: turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect(),
            add_generation_prompt,
            ..Chat::default()
        };
        let prompt = model.encode_chat(&chat(&[("user", "hello, Jörg")], true), "").unwrap();
        assert_eq!(Some(&IM_START), prompt.first());
        let answer = [FIRST_WORD + 3, FIRST_WORD, FIRST_WORD + 31];
        let text = model.decode(&answer, true);
        let second = model.encode_chat(&chat(&[("user", "hello, Jörg"), ("assistant", &text)], false), "").unwrap();
        assert!(second.starts_with(&[prompt, answer.to_vec(), vec![IM_END]].concat()));
    }
}
