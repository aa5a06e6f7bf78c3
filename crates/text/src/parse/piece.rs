//! What a parser tells of the text it takes apart.

/// A part of what a model said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text of the answer.
    Text(String),
    /// Text of its thoughts.
    Reasoning(String),
    /// A tool call begins; its arguments follow.
    CallStart {
        /// Name of the tool.
        name: String,
    },
    /// Arguments of the call that began last, as the model wrote them: JSON text, complete only with `CallEnd`.
    Arguments(String),
    /// The arguments are complete. Missing where a call was cut.
    CallEnd,
}

/// Pieces in order; what is of one kind and follows each other is one piece.
#[derive(Debug, Default)]
pub struct Pieces {
    list: Vec<Piece>,
    /// What a parser could not read, and passed on as text.
    pub(crate) failures: u32,
}

impl Pieces {
    /// Takes what has been told.
    pub fn drain(&mut self) -> impl Iterator<Item = Piece> + '_ {
        self.list.drain(..)
    }

    /// Times that a parser could not read what looked like a call or a header, and passed it on as text.
    #[must_use]
    pub fn failures(&self) -> u32 {
        self.failures
    }

    pub(crate) fn text(&mut self, text: &str) {
        match self.list.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Text(last)) => last.push_str(text),
            _ => self.list.push(Piece::Text(text.to_owned())),
        }
    }

    pub(crate) fn reasoning(&mut self, text: &str) {
        match self.list.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Reasoning(last)) => last.push_str(text),
            _ => self.list.push(Piece::Reasoning(text.to_owned())),
        }
    }

    pub(crate) fn call(&mut self, name: &str) {
        self.list.push(Piece::CallStart { name: name.to_owned() });
    }

    pub(crate) fn arguments(&mut self, json: &str) {
        match self.list.last_mut() {
            _ if json.is_empty() => {}
            Some(Piece::Arguments(last)) => last.push_str(json),
            _ => self.list.push(Piece::Arguments(json.to_owned())),
        }
    }

    pub(crate) fn call_end(&mut self) {
        self.list.push(Piece::CallEnd);
    }

    pub(crate) fn failed(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }
}

/// Text around tool calls. Spaces before the first word and around calls belong to the markup.
#[derive(Debug, Default)]
pub(crate) struct Prose {
    space: String,
    in_words: bool,
    has_calls: bool,
}

impl Prose {
    pub(crate) fn push(&mut self, text: &str, out: &mut Pieces) {
        if self.in_words {
            return out.text(text);
        }
        let words = text.trim_start();
        self.space.push_str(&text[..text.len() - words.len()]);
        if !words.is_empty() {
            self.in_words = true;
            out.text(&std::mem::take(&mut self.space));
            out.text(words);
        }
    }

    /// A call comes next.
    pub(crate) fn call(&mut self) {
        self.space.clear();
        self.in_words = false;
        self.has_calls = true;
    }

    pub(crate) fn finish(&mut self, out: &mut Pieces) {
        let space = std::mem::take(&mut self.space);
        if !self.has_calls {
            out.text(&space);
        }
    }
}
