//! Stop strings in text that arrives in pieces.

/// Finds the first stop string and holds back no more text than could still become one.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    include: bool,
    held: String,
}

/// What a piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text that may be shown.
    pub text: String,
    /// Position of the stop string that was found; nothing is fed after it.
    pub matched: Option<usize>,
}

impl StopStrings {
    /// A search for these strings; empty ones are ignored. With `include` the text ends after the stop string, else
    /// before it.
    #[must_use]
    pub fn new(stops: Vec<String>, include: bool) -> Self {
        Self { stops, include, held: String::new() }
    }

    /// Whether there is nothing to search for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stops.iter().all(String::is_empty)
    }

    /// The stop string of a position.
    #[must_use]
    pub fn get(&self, position: usize) -> &str {
        self.stops.get(position).map_or("", String::as_str)
    }

    /// Takes the next piece.
    pub fn feed(&mut self, piece: &str) -> StopOutcome {
        self.held.push_str(piece);
        let candidates = self.stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        // The first in the text wins; of several at one place, the first in the list.
        let found = candidates
            .clone()
            .filter_map(|(position, stop)| self.held.find(stop.as_str()).map(|at| (at, position, stop.len())))
            .min();
        if let Some((at, position, length)) = found {
            let end = if self.include { at + length } else { at };
            let text = self.held[..end].to_owned();
            self.held.clear();
            return StopOutcome { text, matched: Some(position) };
        }
        let keep = candidates.map(|(_, stop)| possible_start(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        StopOutcome { text: std::mem::replace(&mut self.held, rest), matched: None }
    }

    /// What was held back, at the end of the text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that is a beginning of `stop`.
fn possible_start(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest).rev().find(|length| text.as_bytes().ends_with(&stop.as_bytes()[..*length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_give_what_the_whole_gives(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            include in any::<bool>(),
        ) {
            let whole = pieces.concat();
            let first = stops.iter().filter_map(|stop| whole.find(stop.as_str()).map(|at| (at, stop.len()))).collect::<Vec<_>>();
            // A longer stop string at an earlier place may complete after a shorter one at a later place; the text is
            // cut at the first that completes, so the oracle walks by completion.
            let mut search = StopStrings::new(stops.clone(), include);
            let mut shown = String::new();
            let mut matched = None;
            for piece in &pieces {
                let outcome = search.feed(piece);
                shown.push_str(&outcome.text);
                prop_assert!(whole.starts_with(&shown));
                if outcome.matched.is_some() {
                    matched = outcome.matched;
                    break;
                }
            }
            if let Some(position) = matched {
                let stop = &stops[position];
                let cut = if include { shown.len() - stop.len() } else { shown.len() };
                prop_assert!(whole[cut..].starts_with(stop.as_str()));
            } else {
                shown.push_str(&search.finish());
                prop_assert_eq!(&whole, &shown);
                prop_assert!(first.is_empty());
            }
        }
    }

    #[test]
    fn no_more_is_held_than_could_become_a_stop() {
        let mut search = StopStrings::new(vec!["STOP".to_owned()], false);
        assert_eq!("a ", search.feed("a ST").text);
        assert_eq!("STx", search.feed("x").text);
        assert_eq!(StopOutcome { text: "y".to_owned(), matched: Some(0) }, search.feed("ySTOPz"));
    }
}
