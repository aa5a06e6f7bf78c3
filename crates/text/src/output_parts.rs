//! Outputs of a template that put texts together, `{{ 'a' + b + 'c' }}`, as one output for each part.
//!
//! Templates write the content of a message in the middle of such a sum, and each `+` copies all that is left of it
//! twice: the longest text of a request. Where the first part is a literal, the others have to be texts, so that one
//! after the other they say the same. Each is put behind an empty text, which refuses what the sum would refuse; a text
//! that is read from a variable is written as it is, without another copy.

use std::borrow::Cow;

/// The same template with such outputs taken apart.
pub(crate) fn separated(source: &str) -> Cow<'_, str> {
    let mut text = String::new();
    let (mut copied, mut at) = (0, 0);
    while let Some(found) = source[at..].find('{') {
        let start = at + found;
        let rest = &source[start..];
        let length = match rest.as_bytes().get(1) {
            Some(b'#') => rest.find("#}").map(|end| end + 2),
            Some(b'%') => tag_length(rest),
            Some(b'{') => expression_end(&rest[2..]).map(|end| end + 4),
            _ => Some(1),
        };
        // What is never closed is for the template's own reader to refuse.
        let Some(length) = length else { break };
        at = start + length;
        if rest.starts_with("{{")
            && let Some(parts) = separated_output(&source[start..at])
        {
            text.push_str(&source[copied..start]);
            text.push_str(&parts);
            copied = at;
        }
    }
    if copied == 0 {
        return Cow::Borrowed(source);
    }
    text.push_str(&source[copied..]);
    text.into()
}

/// Length of a tag; of what is raw, up to the tag that ends it.
fn tag_length(rest: &str) -> Option<usize> {
    let length = expression_end_at(&rest[2..], "%}")? + 4;
    let is_tag = |tag: &str, name: &str| tag.trim_matches(['-', '+', ' ', '\t', '\r', '\n']) == name;
    if !is_tag(&rest[2..length - 2], "raw") {
        return Some(length);
    }
    let mut at = length;
    loop {
        let start = at + rest[at..].find("{%")?;
        let end = start + rest[start..].find("%}")? + 2;
        if is_tag(&rest[start + 2..end - 2], "endraw") {
            return Some(end);
        }
        at = start + 2;
    }
}

fn expression_end(expression: &str) -> Option<usize> {
    expression_end_at(expression, "}}")
}

/// Where an expression is closed by a mark that stands in no text and no brackets.
fn expression_end_at(expression: &str, mark: &str) -> Option<usize> {
    let mut scan = Scan::new(expression);
    while let Some((at, depth, _)) = scan.next() {
        if depth == 0 && expression[at..].starts_with(mark) {
            return Some(at);
        }
    }
    None
}

/// One output taken apart; none for any other.
fn separated_output(output: &str) -> Option<String> {
    let inner = output.strip_prefix("{{")?.strip_suffix("}}")?;
    let (open, inner) = match inner.strip_prefix(['-', '+']) {
        Some(stripped) => (&inner[..1], stripped),
        None => ("", inner),
    };
    let (close, inner) = match inner.strip_suffix(['-', '+']) {
        Some(stripped) => (&inner[inner.len() - 1..], stripped),
        None => ("", inner),
    };
    let parts = parts_of(inner)?;
    let [first, others @ ..] = parts.as_slice() else { return None };
    if others.is_empty() || !is_literal(first) {
        return None;
    }
    let mut text = format!("{{{{{open} {first} ");
    for part in others {
        text.push_str("}}{{ ");
        if is_read(part) {
            text.push_str(part);
            text.push_str(" if ");
            text.push_str(part);
            text.push_str(" is string else ");
        }
        if !is_literal(part) {
            text.push_str("'' + ");
        }
        text.push_str(part);
        text.push(' ');
    }
    text.push_str(close);
    text.push_str("}}");
    Some(text)
}

/// The operands of an expression that is a sum and nothing else.
fn parts_of(expression: &str) -> Option<Vec<&str>> {
    const OTHER_OPERATORS: [char; 12] = ['-', '~', '*', '/', '%', '=', '<', '>', '!', ',', ':', ';'];
    const WORDS: [&str; 7] = ["if", "else", "and", "or", "not", "in", "is"];
    let mut parts = Vec::new();
    let mut from = 0;
    let mut scan = Scan::new(expression);
    let mut word_from = None;
    while let Some((at, depth, in_text)) = scan.next() {
        let character = expression[at..].chars().next()?;
        let is_of_word = depth == 0 && !in_text && (character.is_alphanumeric() || character == '_');
        match (is_of_word, word_from) {
            (true, None) => word_from = Some(at),
            (false, Some(start)) => {
                if WORDS.contains(&&expression[start..at]) {
                    return None;
                }
                word_from = None;
            }
            _ => {}
        }
        if depth == 0 && !in_text {
            if character == '+' {
                parts.push(expression[from..at].trim());
                from = at + 1;
            } else if OTHER_OPERATORS.contains(&character) {
                return None;
            }
        }
    }
    if scan.is_open() || word_from.is_some_and(|start| WORDS.contains(&&expression[start..])) {
        return None;
    }
    parts.push(expression[from..].trim());
    parts.iter().all(|part| !part.is_empty()).then_some(parts)
}

/// Whether an operand is one text in quotes and nothing more.
fn is_literal(part: &str) -> bool {
    let Some(quote) = part.chars().next().filter(|first| matches!(first, '\'' | '"')) else { return false };
    let mut is_escaped = false;
    for (at, character) in part.char_indices().skip(1) {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if character == quote => return at + 1 == part.len(),
            _ => {}
        }
    }
    false
}

/// Whether an operand is a variable, or an attribute or item of one: to ask for it twice costs nothing.
fn is_read(part: &str) -> bool {
    let is_of_path =
        |character: char| character.is_alphanumeric() || matches!(character, '_' | '.' | '[' | ']' | '\'' | '"');
    part.starts_with(|first: char| first.is_alphabetic() || first == '_') && part.chars().all(is_of_path)
}

/// Walks an expression: each place, how many brackets are open there, and whether it is inside a text. Quotes belong to
/// their text, and brackets to what they enclose.
struct Scan<'a> {
    expression: &'a str,
    at: usize,
    depth: usize,
    quote: Option<char>,
    is_escaped: bool,
}

impl<'a> Scan<'a> {
    fn new(expression: &'a str) -> Self {
        Self { expression, at: 0, depth: 0, quote: None, is_escaped: false }
    }

    fn is_open(&self) -> bool {
        self.depth > 0 || self.quote.is_some()
    }

    fn next(&mut self) -> Option<(usize, usize, bool)> {
        let at = self.at;
        let character = self.expression[at..].chars().next()?;
        self.at += character.len_utf8();
        if let Some(quote) = self.quote {
            match character {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                _ if character == quote => self.quote = None,
                _ => {}
            }
            // A text counts as enclosed: nothing in it is a mark.
            return Some((at, self.depth + 1, true));
        }
        match character {
            '\'' | '"' => {
                self.quote = Some(character);
                return Some((at, self.depth + 1, true));
            }
            '(' | '[' | '{' => {
                self.depth += 1;
                return Some((at, self.depth, false));
            }
            ')' | ']' | '}' if self.depth > 0 => {
                self.depth -= 1;
                return Some((at, self.depth + 1, false));
            }
            _ => {}
        }
        Some((at, self.depth, false))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn sums_that_begin_with_a_literal_are_taken_apart() {
        for (source, expected) in [
            ("{{ 'a' + b }}", "{{ 'a' }}{{ b if b is string else '' + b }}"),
            ("x{{- \"a\" + b['+'] + 'c' -}}y", "x{{- \"a\" }}{{ '' + b['+'] }}{{ 'c' -}}y"),
            ("{{ 'a' + b['c'].d }}", "{{ 'a' }}{{ b['c'].d if b['c'].d is string else '' + b['c'].d }}"),
            ("{{ '}}' + f(1 + 2)|trim }}{{ x }}", "{{ '}}' }}{{ '' + f(1 + 2)|trim }}{{ x }}"),
            ("{{ '{{' + {'a': 'b'}['a'] }}", "{{ '{{' }}{{ '' + {'a': 'b'}['a'] }}"),
        ] {
            assert_eq!(expected, separated(source));
        }
    }

    #[test]
    fn everything_else_stays() {
        for source in [
            "",
            "{",
            "plain {{ 'a' }} {{ a + 'b' }}",
            "{{ 'a' ~ b + c }}",
            "{{ 'a' + b if c else d }}",
            "{{ 'a' + b - 1 }}",
            "{{ 'a' + b is none }}",
            "{{ 'a' 'b' + c }}",
            "{{ ('a' + b) * 2 }}",
            "{# {{ 'a' + b }} #}",
            "{% raw %}{{ 'a' + b }}{% endraw %}",
            "{% set x = 'a' + b %}",
            "{{ 'a' + }}",
            "{{ 'a' + b",
        ] {
            assert_eq!(source, separated(source));
        }
    }

    fn render(source: &str, taken_apart: bool) -> Result<String, String> {
        let environment = minijinja::Environment::new();
        let source = if taken_apart { separated(source).into_owned() } else { source.to_owned() };
        let context = json!({"text": "t", "none": null, "one": 1, "list": ["l"], "map": {"key": "v"}});
        environment
            .render_str(&source, minijinja::value::Value::from(minijinja::value::Serde(context)))
            .map_err(|error| error.detail().unwrap_or_default().to_owned())
    }

    proptest! {
        #[test]
        fn it_says_or_refuses_the_same(
            pieces in prop::collection::vec(
                prop::sample::select(vec![
                    "'lit'", "\"a'+\"", "text", "none", "one", "list", "list[0]", "map.key", "map['key']|upper", "missing",
                    "(text + 'x')", "text if one else 'n'", "one * 2", "not text", "'\\'+\\''", "-one",
                ]), 1..5),
            open in prop::sample::select(vec!["{{ ", "{{- "]),
            close in prop::sample::select(vec![" }}", " -}}"]),
        ) {
            let source = format!("a {open}{}{close} b", pieces.join(" + "));
            prop_assert_eq!(render(&source, false), render(&source, true), "{}", separated(&source));
        }
    }
}
