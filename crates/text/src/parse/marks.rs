//! Marks in text that arrives in pieces.

/// What a search found at the front of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search<'a> {
    /// A mark, and the bytes before it.
    Mark(usize, &'a str),
    /// No mark; so many bytes cannot become a part of one.
    Clear(usize),
}

/// The first of some marks, none of which begins another.
pub(crate) fn search<'a>(text: &str, marks: &[&'a str]) -> Search<'a> {
    let mut first: Option<(usize, &'a str)> = None;
    for mark in marks {
        let until = first.map_or(text.len(), |(at, other): (usize, &str)| text.len().min(at + other.len()));
        if let Some(at) = text.get(..until).unwrap_or(text).find(mark)
            && first.is_none_or(|(other, _)| at < other)
        {
            first = Some((at, mark));
        }
    }
    if let Some((at, mark)) = first {
        return Search::Mark(at, mark);
    }
    let held = marks.iter().map(|mark| unfinished(text, mark)).max().unwrap_or(0);
    Search::Clear(text.len() - held)
}

/// Length of the longest end of a text that begins a mark.
fn unfinished(text: &str, mark: &str) -> usize {
    let longest = text.len().min(mark.len().saturating_sub(1));
    (1..=longest).rev().find(|length| text.as_bytes().ends_with(&mark.as_bytes()[..*length])).unwrap_or(0)
}

/// A machine that takes text from the front.
pub(crate) trait Machine {
    /// Takes some bytes of the front of `rest`, or none and changes its state. `None`: more must arrive first. What it
    /// leaves undecided is short, so that the whole costs time in proportion to the text.
    fn step(&mut self, rest: &str, out: &mut super::Pieces) -> Option<usize>;

    /// The text ends with `rest`, which no step took.
    fn finish(&mut self, rest: &str, out: &mut super::Pieces);
}

/// A machine and the text that it has not decided on.
#[derive(Debug, Default)]
pub(crate) struct Fed<M> {
    pub(crate) machine: M,
    held: String,
}

impl<M: Machine> Fed<M> {
    pub(crate) fn new(machine: M) -> Self {
        Self { machine, held: String::new() }
    }

    pub(crate) fn feed(&mut self, piece: &str, out: &mut super::Pieces) {
        let mut held = std::mem::take(&mut self.held);
        let text = if held.is_empty() {
            piece
        } else {
            held.push_str(piece);
            held.as_str()
        };
        let mut from = 0;
        while let Some(taken) = self.machine.step(text.get(from..).unwrap_or_default(), out) {
            from += taken;
        }
        text.get(from..).unwrap_or_default().clone_into(&mut self.held);
    }

    pub(crate) fn finish(&mut self, out: &mut super::Pieces) {
        let held = std::mem::take(&mut self.held);
        self.machine.finish(&held, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mark_is_found_and_the_begin_of_one_held() {
        assert_eq!(Search::Mark(1, "<b>"), search("x<b><a>", &["<a>", "<b>"]));
        assert_eq!(Search::Mark(0, "<a>"), search("<a><b>", &["<b>", "<a>"]));
        assert_eq!(Search::Clear(2), search("x<<a", &["<a>", "<b>"]));
        assert_eq!(Search::Clear(4), search("x<a ", &["<a>"]));
        assert_eq!(Search::Clear(0), search("", &["<a>"]));
    }
}
