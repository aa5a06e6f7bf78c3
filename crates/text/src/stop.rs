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
    ///
    /// The stop string that is complete first wins, and of those that end together the longest: so the answer does not
    /// depend on how the text was cut into pieces.
    pub fn feed(&mut self, piece: &str) -> StopOutcome {
        self.held.push_str(piece);
        let candidates = self.stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        let found = candidates
            .clone()
            .filter_map(|(position, stop)| {
                self.held.find(stop.as_str()).map(|start| (start + stop.len(), start, position))
            })
            .min();
        if let Some((end, start, position)) = found {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(if self.include { end } else { start });
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

    /// Shown text and stop string of a whole text, without any pieces.
    fn naive(whole: &str, stops: &[String], include: bool) -> (String, Option<usize>) {
        for end in 0..=whole.len() {
            let Some(seen) = whole.get(..end) else { continue };
            let ending = |stop: &&String| !stop.is_empty() && seen.ends_with(stop.as_str());
            if let Some(longest) = stops.iter().filter(ending).map(String::len).max() {
                let position = stops.iter().position(|stop| stop.len() == longest && ending(&stop));
                return (whole[..if include { end } else { end - longest }].to_owned(), position);
            }
        }
        (whole.to_owned(), None)
    }

    proptest! {
        #[test]
        fn pieces_give_what_the_whole_gives(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            stops in prop::collection::vec("[abé]{0,4}", 0..4),
            include in any::<bool>(),
        ) {
            let mut search = StopStrings::new(stops.clone(), include);
            let mut shown = String::new();
            let mut matched = None;
            for piece in &pieces {
                let outcome = search.feed(piece);
                shown.push_str(&outcome.text);
                matched = outcome.matched;
                if matched.is_some() {
                    break;
                }
            }
            shown.push_str(&search.finish());
            prop_assert_eq!(naive(&pieces.concat(), &stops, include), (shown, matched));
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
