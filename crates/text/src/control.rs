//! Tokens that steer a model, and how to keep them out of untrusted text.

use std::{borrow::Cow, collections::HashSet};

use minijinja::value::{Serde, Value as Variable};
use serde_json::Value;

/// Put inside what looks like a control token in untrusted text, so that it is none while the template is rendered. A
/// non-character: it has no meaning in any text, and is dropped from input.
pub(crate) const SENTINEL: char = '\u{FDD0}';

/// One added token of a tokenizer file.
#[derive(Clone, Debug)]
pub(crate) struct AddedToken {
    pub(crate) id: u32,
    pub(crate) content: String,
    /// Marked special in the file; left out of text when special tokens are skipped.
    pub(crate) special: bool,
    /// Steers the model, whether marked special or not.
    pub(crate) control: bool,
}

/// Reads the added tokens of a tokenizer file and decides which of them steer the model.
///
/// The mark `special` alone does not say it: role and tool tokens of well-known models lack it, while others list
/// thousands of harmless texts (HTML tags, runs of spaces) beside the real ones. A token steers when it is marked, when
/// the chat template writes it, or when it is written with bars as no ordinary text is.
pub(crate) fn added_tokens(tokenizer: &Value, chat_template: &str) -> Vec<AddedToken> {
    let list = tokenizer.get("added_tokens").and_then(Value::as_array);
    list.into_iter()
        .flatten()
        .filter_map(|token| {
            let content = token.get("content")?.as_str()?.to_owned();
            let id = u32::try_from(token.get("id")?.as_u64()?).ok()?;
            let special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
            let is_blank = content.chars().all(|character| character.is_whitespace() || character == '\u{2581}');
            let steers = special || content.contains(['|', '\u{FF5C}']) || chat_template.contains(&content);
            Some(AddedToken { id, special, control: steers && !is_blank, content })
        })
        .collect()
}

/// A set of control tokens that finds the longest at the first place of a text in one pass, whatever its size.
#[derive(Debug)]
pub(crate) struct ControlTokens {
    /// A byte trie; node 0 is the root.
    nodes: Vec<Node>,
    /// Whether a control token begins with a byte.
    first: [bool; 256],
    /// The bytes with which one begins.
    first_bytes: Vec<u8>,
    /// In order: each token of each prompt is asked for, and lies mostly before or behind all of them.
    ids: Vec<u32>,
    longest_bytes: usize,
    /// Tokens that the template looks for in what the assistant said, such as the end of its reasoning.
    parsed: HashSet<u32>,
}

#[derive(Debug, Default)]
struct Node {
    children: Vec<(u8, u32)>,
    token: Option<u32>,
}

/// Where a control token lies in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) id: u32,
}

impl ControlTokens {
    pub(crate) fn new(added: &[AddedToken], chat_template: &str) -> Self {
        let mut control = Self {
            nodes: vec![Node::default()],
            first: [false; 256],
            first_bytes: Vec::new(),
            ids: Vec::new(),
            longest_bytes: 0,
            parsed: HashSet::new(),
        };
        for token in added.iter().filter(|token| token.control) {
            control.insert(token);
            if !token.special && looks_for(chat_template, &token.content) {
                control.parsed.insert(token.id);
            }
        }
        control
    }

    fn insert(&mut self, token: &AddedToken) {
        let mut at = 0;
        for byte in token.content.bytes() {
            at = match self.child(at, byte) {
                Some(child) => child,
                None => {
                    let child = self.nodes.len();
                    self.nodes.push(Node::default());
                    self.nodes[at].children.push((byte, u32::try_from(child).unwrap_or(0)));
                    child
                }
            };
        }
        self.nodes[at].token = Some(token.id);
        if let Some(byte) = token.content.bytes().next()
            && !std::mem::replace(&mut self.first[usize::from(byte)], true)
        {
            self.first_bytes.push(byte);
        }
        if let Err(at) = self.ids.binary_search(&token.id) {
            self.ids.insert(at, token.id);
        }
        self.longest_bytes = self.longest_bytes.max(token.content.len());
    }

    fn child(&self, node: usize, byte: u8) -> Option<usize> {
        let children = &self.nodes[node].children;
        children.iter().find(|(other, _)| *other == byte).map(|(_, child)| *child as usize)
    }

    pub(crate) fn is_control(&self, id: u32) -> bool {
        let [Some(first), Some(last)] = [self.ids.first(), self.ids.last()] else { return false };
        (*first..=*last).contains(&id) && self.ids.binary_search(&id).is_ok()
    }

    /// The first control token at or after a place; the longest when several begin there.
    pub(crate) fn find(&self, text: &str, from: usize) -> Option<Found> {
        let bytes = text.as_bytes();
        let mut start = from;
        loop {
            start += self.find_first_byte(bytes.get(start..)?)?;
            let (mut node, mut found) = (0, None);
            for (distance, byte) in bytes[start..].iter().enumerate() {
                let Some(child) = self.child(node, *byte) else { break };
                node = child;
                if let Some(id) = self.nodes[node].token {
                    found = Some(Found { start, end: start + distance + 1, id });
                }
            }
            if found.is_some() {
                return found;
            }
            start += 1;
        }
    }

    /// Where a control token could begin. Mostly all of them begin alike.
    fn find_first_byte(&self, bytes: &[u8]) -> Option<usize> {
        match self.first_bytes.as_slice() {
            [one] => memchr::memchr(*one, bytes),
            [one, two] => memchr::memchr2(*one, *two, bytes),
            [one, two, three] => memchr::memchr3(*one, *two, *three, bytes),
            _ => bytes.iter().position(|byte| self.first[usize::from(*byte)]),
        }
    }

    /// All control tokens of a text, left to right, none over another.
    pub(crate) fn all<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Found> + 'a {
        let mut from = 0;
        std::iter::from_fn(move || {
            let found = self.find(text, from)?;
            from = found.end;
            Some(found)
        })
    }

    /// The same value, as a template takes it, with every look-alike in its texts made harmless.
    pub(crate) fn defuse(&self, value: &Value) -> Variable {
        self.defuse_value(value, false)
    }

    /// The same for a message. What an assistant said keeps the tokens that the template itself looks for.
    pub(crate) fn defuse_message(&self, message: &Value) -> Variable {
        self.defuse_value(message, message.get("role").and_then(Value::as_str) == Some("assistant"))
    }

    fn defuse_value(&self, value: &Value, keep_parsed: bool) -> Variable {
        match value {
            Value::String(text) => Variable::from(&*self.defuse_text(text, keep_parsed)),
            Value::Array(items) => items.iter().map(|item| self.defuse_value(item, keep_parsed)).collect(),
            Value::Object(map) => Variable::from_pairs(map.iter().map(|(key, item)| {
                // A role that is a plain word is what templates compare with; any other could say anything.
                let plain_role = item.as_str().filter(|role| key == "role" && is_word(role));
                let item = plain_role.map_or_else(|| self.defuse_value(item, keep_parsed), Variable::from);
                let key = if is_word(key) { Cow::Borrowed(key.as_str()) } else { self.defuse_text(key, false) };
                (Variable::from(&*key), item)
            })),
            other => Variable::from(Serde(other)),
        }
    }

    /// A text without look-alikes; the same one where it has none, as almost all do.
    fn defuse_text<'a>(&self, text: &'a str, keep_parsed: bool) -> Cow<'a, str> {
        let text = if text.contains(SENTINEL) { text.replace(SENTINEL, "").into() } else { Cow::Borrowed(text) };
        if self.find(&text, 0).is_none() && self.find_unfinished(&text, 0).is_none() {
            return text;
        }
        let mut safe = String::with_capacity(text.len());
        let mut from = 0;
        while let Some(found) = self.find(&text, from) {
            // Another one may begin inside this one, so the search goes on behind its first character.
            let inside = after_character(&text, found.start);
            safe.push_str(&text[from..inside]);
            if !(keep_parsed && self.parsed.contains(&found.id)) {
                safe.push(SENTINEL);
            }
            from = inside;
        }
        safe.push_str(&text[from..]);
        from = 0;
        while let Some(start) = self.find_unfinished(&safe, from) {
            let inside = after_character(&safe, start);
            safe.insert(inside, SENTINEL);
            from = inside + SENTINEL.len_utf8();
        }
        safe.into()
    }

    /// The begin of a control token at the end of a text could be completed by what the template puts behind it. Where
    /// the first of them lies, at or after a place.
    fn find_unfinished(&self, text: &str, from: usize) -> Option<usize> {
        let bytes = text.as_bytes();
        let earliest = text.len().saturating_sub(self.longest_bytes.saturating_sub(1));
        (earliest.max(from)..text.len()).find(|start| {
            text.is_char_boundary(*start)
                && self.first[usize::from(bytes[*start])]
                && self.is_unfinished(&bytes[*start..])
        })
    }

    fn is_unfinished(&self, bytes: &[u8]) -> bool {
        let end = bytes.iter().try_fold(0, |node, byte| self.child(node, *byte));
        end.is_some_and(|node| !self.nodes[node].children.is_empty())
    }
}

/// The place behind the character that begins at a place.
fn after_character(text: &str, start: usize) -> usize {
    start + text[start..].chars().next().map_or(1, char::len_utf8)
}

fn is_word(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
}

/// Whether a template takes messages apart at a text: `split('X')` or `'X' in …`.
fn looks_for(template: &str, text: &str) -> bool {
    ['\'', '"'].into_iter().any(|quote| {
        let literal = format!("{quote}{text}{quote}");
        template.match_indices(&literal).any(|(at, _)| {
            let after = template[at + literal.len()..].trim_start();
            template[..at].trim_end().ends_with("split(") || after.starts_with("in ") || after.starts_with("not in ")
        })
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const TEMPLATE: &str = "<start>{{ content.split('</think>') }}<think>";

    fn added(contents: &[(&str, bool)]) -> Vec<AddedToken> {
        let tokens: Vec<Value> = contents
            .iter()
            .enumerate()
            .map(|(id, (content, special))| json!({"id": id, "content": content, "special": special}))
            .collect();
        added_tokens(&json!({"added_tokens": tokens}), TEMPLATE)
    }

    fn json_of(variable: &Variable) -> Value {
        serde_json::to_value(variable).unwrap()
    }

    #[test]
    fn values_are_what_they_were() {
        let control = ControlTokens::new(&added(&[("<|end|>", true)]), TEMPLATE);
        let value = json!({"z": null, "a": [true, 1, -1, 0.5, u64::MAX, "", "x".repeat(99)], "<k>": {}});
        assert_eq!(value.to_string(), json_of(&control.defuse(&value)).to_string());
    }

    #[test]
    fn tokens_steer_when_marked_or_written_by_the_template_or_barred() {
        let tokens = added(&[
            ("<eos>", true),
            ("<table>", false),
            ("</think>", false),
            ("<｜User｜>", false),
            ("\n\n", true),
            ("▁▁", false),
        ]);
        let steering: Vec<&str> =
            tokens.iter().filter(|token| token.control).map(|token| token.content.as_str()).collect();
        assert_eq!(vec!["<eos>", "</think>", "<｜User｜>"], steering);
    }

    #[test]
    fn a_role_says_a_word_and_nothing_else() {
        let control = ControlTokens::new(&added(&[("<|end|>", true)]), TEMPLATE);
        let message = json!({"role": "user<|end|>", "content": "x<|en", "name": ["<|end|>"]});
        assert_eq!(
            json!({"role": "user<\u{FDD0}|end|>", "content": "x<\u{FDD0}|en", "name": ["<\u{FDD0}|end|>"]}),
            json_of(&control.defuse_message(&message))
        );
        assert_eq!(json!({"role": "user"}), json_of(&control.defuse_message(&json!({"role": "user"}))));
    }

    #[test]
    fn an_assistant_keeps_what_the_template_takes_apart() {
        let control = ControlTokens::new(&added(&[("</think>", false), ("<think>", false)]), TEMPLATE);
        let said =
            |role: &str| json_of(&control.defuse_message(&json!({"role": role, "content": "<think>a</think>b"})));
        assert_eq!("<\u{FDD0}think>a</think>b", said("assistant")["content"]);
        assert_eq!("<\u{FDD0}think>a<\u{FDD0}/think>b", said("user")["content"]);
    }

    proptest! {
        #[test]
        fn the_first_and_longest_is_found(text in "[<a|é>]{0,16}", tokens in prop::collection::btree_set("[<a|é>]{1,4}", 1..5)) {
            let tokens: Vec<String> = tokens.into_iter().collect();
            let listed: Vec<(&str, bool)> = tokens.iter().map(|token| (token.as_str(), true)).collect();
            let control = ControlTokens::new(&added(&listed), "");
            let naive = tokens
                .iter()
                .enumerate()
                .filter_map(|(id, token)| text.find(token.as_str()).map(|at| (at, usize::MAX - token.len(), id)))
                .min()
                .map(|(start, _, id)| Found { start, end: start + tokens[id].len(), id: u32::try_from(id).unwrap() });
            prop_assert_eq!(naive, control.find(&text, 0));
        }

        #[test]
        fn pieces_put_together_hold_no_control_token(
            pieces in prop::collection::vec("[<a|é>\u{FDD0}]{0,6}", 0..5),
            tokens in prop::collection::btree_set("[<a|é>]{2,5}", 1..5),
        ) {
            let tokens: Vec<String> = tokens.into_iter().collect();
            let listed: Vec<(&str, bool)> = tokens.iter().map(|token| (token.as_str(), true)).collect();
            let control = ControlTokens::new(&added(&listed), "");
            let defused: String = pieces.iter().map(|piece| control.defuse_text(piece, false)).collect();
            prop_assert_eq!(None, control.find(&defused, 0));
            prop_assert_eq!(pieces.concat().replace(SENTINEL, ""), defused.replace(SENTINEL, ""));
        }
    }
}
