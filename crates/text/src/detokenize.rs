//! Token ids to text as they come: whole characters, as early as possible.

use std::sync::Arc;

use crate::vocabulary::Vocabulary;

/// Turns tokens into text. Never emits half a character, never holds a whole one back.
#[derive(Debug)]
pub struct Detokenizer {
    vocabulary: Arc<Vocabulary>,
    skip_special: bool,
    /// Special tokens that are text all the same.
    shown: Vec<u32>,
    /// At most three bytes of a character that is not complete.
    held: Vec<u8>,
    at_start: bool,
}

impl Detokenizer {
    /// For a text of its own: sentencepiece's mark of the first word is no space.
    pub(crate) fn from_start(vocabulary: Arc<Vocabulary>, skip_special: bool) -> Self {
        let at_start = vocabulary.strips_first_space();
        Self { vocabulary, skip_special, shown: Vec::new(), held: Vec::new(), at_start }
    }

    /// For what follows a prompt: a space at the begin belongs between the two.
    pub(crate) fn after_prompt(vocabulary: Arc<Vocabulary>, skip_special: bool) -> Self {
        Self { vocabulary, skip_special, shown: Vec::new(), held: Vec::new(), at_start: false }
    }

    /// The same, with these special tokens in the text.
    pub(crate) fn showing(mut self, shown: Vec<u32>) -> Self {
        self.shown = shown;
        self
    }

    /// Appends the text that a token completes.
    pub fn push(&mut self, id: u32, text: &mut String) {
        if self.skip_special && self.vocabulary.is_special(id) && !self.shown.contains(&id) {
            return;
        }
        let mut bytes = self.vocabulary.bytes_of(id);
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        if self.held.is_empty()
            && let Ok(whole) = std::str::from_utf8(bytes)
        {
            text.push_str(whole);
            return;
        }
        self.held.extend_from_slice(bytes);
        let held = std::mem::take(&mut self.held);
        let mut rest = held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(whole) => return text.push_str(whole),
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    match error.error_len() {
                        Some(length) => {
                            text.push('\u{FFFD}');
                            rest = &after[length..];
                        }
                        None => {
                            self.held.extend_from_slice(after);
                            return;
                        }
                    }
                }
            }
        }
    }

    /// Bytes of a character that is not complete: at most three.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// What is left at the end: a broken character becomes U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        if !self.held.is_empty() {
            text.push_str(&String::from_utf8_lossy(&self.held));
            self.held.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{StopStrings, sample};

    #[test]
    fn special_tokens_that_a_parser_looks_for_are_text_and_others_are_not() {
        let model = sample::model();
        let ids = model.encode_prompt("<|im_start|>a<|im_end|>").unwrap();
        let mut shown = String::new();
        let mut detokenizer = model.detokenizer_with(&["<|im_end|>", "<|unheard_of|>"]);
        ids.iter().for_each(|id| detokenizer.push(*id, &mut shown));
        assert_eq!("a<|im_end|>", shown);
    }

    #[test]
    fn a_stop_string_is_found_across_tokens_and_within_characters_of_several_tokens() {
        for model in [sample::model(), sample::fallback_model()] {
            let ids = model.encode("x 😀é!", false).unwrap();
            assert!(ids.len() > 5, "the characters are spread over tokens");
            let mut stops = StopStrings::new(vec!["😀é".to_owned()], false);
            let mut detokenizer = model.detokenizer(true);
            let mut shown = String::new();
            let found = ids.iter().any(|id| {
                let mut text = String::new();
                detokenizer.push(*id, &mut text);
                let outcome = stops.feed(&text);
                shown.push_str(&outcome.text);
                outcome.matched.is_some()
            });
            assert_eq!((true, "x "), (found, shown.trim_start_matches(' ')));
        }
    }

    #[test]
    fn a_hundred_thousand_tokens_take_time_in_proportion() {
        let begun = std::time::Instant::now();
        for model in [sample::model(), sample::fallback_model()] {
            let letters = "a".repeat(100_000);
            let ids = model.encode(&letters, false).unwrap();
            assert_eq!(letters, model.decode(&ids, false));
            let mut stops = StopStrings::new(vec!["aab".repeat(300)], false);
            let mut detokenizer = model.detokenizer(true);
            let mut text = String::new();
            for id in &ids {
                detokenizer.push(*id, &mut text);
                stops.feed(&std::mem::take(&mut text));
            }
        }
        assert!(begun.elapsed().as_secs() < 60, "{:?}", begun.elapsed());
    }
}
