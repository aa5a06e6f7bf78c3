//! What has to be seen of a stream of chat completion chunks to know how it ended.

use bytes::Bytes;

/// End a stream, at the start of a line.
const END_MARKS: [&[u8]; 2] = [b"data: [DONE]", b"data:[DONE]"];
/// Begin an event that tells of an error.
const ERROR_MARKS: [&[u8]; 2] = [b"data: {\"error\"", b"data:{\"error\""];
/// Stands before a finish reason. In the text of an answer the quotes would be escaped.
const REASON_KEY: &[u8] = b"\"finish_reason\":";
/// Most bytes of a line.
const LONGEST_LINE: usize = 16 * 1024 * 1024;

/// Reads a stream as it passes, whatever pieces it comes in. Lines pass when they are whole: half an event is none, and
/// a client that got half of one could not read the error behind it.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// The part of a line that has come.
    held: Vec<u8>,
    /// Bytes of `REASON_KEY` that the last bytes are.
    matched: usize,
    /// The key was read, and the first byte of its value was not.
    awaits_value: bool,
    /// A choice has ended with a reason.
    pub(crate) has_reason: bool,
    /// An event has told of an error.
    pub(crate) has_error: bool,
    /// The end mark was read; nothing behind it is passed on, nor is the mark itself.
    pub(crate) has_ended: bool,
}

/// A line has no end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LineTooLong;

impl Scan {
    /// Takes a piece and returns what may be passed on.
    pub(crate) fn take(&mut self, piece: Bytes) -> Result<Bytes, LineTooLong> {
        if self.has_ended {
            return Ok(Bytes::new());
        }
        let Some(last) = piece.iter().rposition(|byte| *byte == b'\n') else {
            self.held.extend_from_slice(&piece);
            return if self.held.len() > LONGEST_LINE { Err(LineTooLong) } else { Ok(Bytes::new()) };
        };
        let rest = piece.slice(last + 1..);
        let lines = if self.held.is_empty() {
            piece.slice(..=last)
        } else {
            let mut whole = std::mem::take(&mut self.held);
            whole.extend_from_slice(&piece[..=last]);
            Bytes::from(whole)
        };
        self.held.extend_from_slice(&rest);
        let mut start = 0;
        for line in lines.split_inclusive(|byte| *byte == b'\n') {
            let begins = |marks: &[&[u8]]| marks.iter().any(|mark| line.starts_with(mark));
            if begins(&END_MARKS) {
                self.has_ended = true;
                return Ok(lines.slice(..start));
            }
            self.has_error |= begins(&ERROR_MARKS);
            line.iter().for_each(|byte| self.reason(*byte));
            start += line.len();
        }
        Ok(lines)
    }

    fn reason(&mut self, byte: u8) {
        if self.awaits_value {
            if byte != b' ' {
                self.awaits_value = false;
                // `null` is no reason.
                self.has_reason |= byte == b'"';
            }
            return;
        }
        self.matched = match REASON_KEY.get(self.matched) {
            Some(expected) if *expected == byte => self.matched + 1,
            _ => usize::from(byte == b'"'),
        };
        if self.matched == REASON_KEY.len() {
            self.matched = 0;
            self.awaits_value = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a \\\"finish_reason\\\":\\\"stop\\\" \
                          \\ndata: [DONE]\"},\"finish_reason\":null}]}\n\n: comment\n\ndata: {\"choices\":[{\"delta\":{},\
                          \"finish_reason\": \"stop\"}]}\n\ndata: [DONE]\n\nwhat nobody needs";

    fn pass(pieces: &[&[u8]]) -> (Vec<u8>, Scan) {
        let mut scan = Scan::default();
        let passed =
            pieces.iter().flat_map(|piece| scan.take(Bytes::copy_from_slice(piece)).unwrap().to_vec()).collect();
        (passed, scan)
    }

    #[test]
    fn text_that_looks_like_a_mark_is_none() {
        let text = STREAM.split("data: {\"choices\":[{\"delta\":{},").next().unwrap();
        let (passed, scan) = pass(&[text.as_bytes()]);
        assert_eq!(text.as_bytes(), passed);
        assert!(!scan.has_reason && !scan.has_ended && !scan.has_error);
    }

    #[test]
    fn an_error_is_seen_with_and_without_a_space() {
        for text in ["data: {\"error\":{}}\n\n", "data:{\"error\":{}}\n\n"] {
            let (passed, scan) = pass(&[text.as_bytes()]);
            assert_eq!((text.as_bytes(), true), (passed.as_slice(), scan.has_error));
        }
    }

    proptest! {
        #[test]
        fn however_it_is_cut_the_same_is_passed_on_and_seen(mut cuts in prop::collection::vec(0..STREAM.len(), 0..8)) {
            cuts.sort_unstable();
            let mut pieces = Vec::new();
            let mut start = 0;
            for cut in cuts.into_iter().chain([STREAM.len()]) {
                pieces.push(&STREAM.as_bytes()[start..cut]);
                start = cut;
            }
            let (passed, scan) = pass(&pieces);
            let expected = &STREAM[..STREAM.rfind("data: [DONE]").unwrap()];
            prop_assert_eq!(expected.as_bytes(), passed.as_slice());
            prop_assert!(scan.has_reason && scan.has_ended && !scan.has_error);
        }

        #[test]
        fn a_stream_that_is_cut_short_has_not_ended(kept in 0..STREAM.len()) {
            let end = STREAM.rfind("data: [DONE]\n").unwrap() + "data: [DONE]\n".len();
            let (passed, scan) = pass(&[&STREAM.as_bytes()[..kept]]);
            prop_assert_eq!(kept >= end, scan.has_ended);
            prop_assert!(passed.is_empty() || passed.ends_with(b"\n"), "half a line");
        }
    }
}
