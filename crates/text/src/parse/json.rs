//! JSON that arrives in pieces, read without building it.

/// Where a value stands after some text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// It goes on.
    More,
    /// It ended.
    Done,
    /// What comes next cannot belong to it.
    Broken,
}

/// Finds the end of one JSON value. It counts brackets and knows strings; whether the rest is JSON is the reader's to
/// find out, as with every model.
#[derive(Debug, Default)]
pub(crate) struct ValueEnd {
    /// The brackets that are open.
    open: Vec<u8>,
    in_string: bool,
    escaped: bool,
    /// A number or a word, which ends before what cannot be a part of it.
    in_scalar: bool,
}

impl ValueEnd {
    /// How many bytes of `text` belong to the value, and how it stands then. The first byte begins the value.
    pub(crate) fn feed(&mut self, text: &str) -> (usize, Status) {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => {
                        self.in_string = false;
                        if self.open.is_empty() {
                            return (at + 1, Status::Done);
                        }
                    }
                    _ => {}
                }
                continue;
            }
            if self.in_scalar {
                if !is_scalar(byte) {
                    return (at, Status::Done);
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.open.push(byte),
                b'}' | b']' => {
                    let opener = if byte == b'}' { b'{' } else { b'[' };
                    if self.open.pop() != Some(opener) {
                        return (at, Status::Broken);
                    }
                    if self.open.is_empty() {
                        return (at + 1, Status::Done);
                    }
                }
                _ if !self.open.is_empty() => {}
                _ if is_scalar(byte) => self.in_scalar = true,
                _ => return (at, Status::Broken),
            }
        }
        (text.len(), Status::More)
    }
}

/// Whether a byte may be a part of a number or of `true`, `false`, `null`.
fn is_scalar(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i32>().prop_map(Into::into),
            "[a\\\\\"{}\\[\\],é ]{0,6}".prop_map(Into::into),
        ];
        leaf.prop_recursive(3, 12, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(serde_json::Value::from),
                prop::collection::btree_map("[a\"\\\\}]{0,3}", inner, 0..4)
                    .prop_map(|map| map.into_iter().collect::<serde_json::Map<_, _>>().into()),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_value_ends_where_it_was_written_to_end(json in any_json(), pretty in any::<bool>(), cut in any::<prop::sample::Index>()) {
            let written = if pretty { format!("{json:#}") } else { json.to_string() };
            let text = format!("{written},x");
            let cuts: Vec<usize> = (0..=written.len()).filter(|at| text.is_char_boundary(*at)).collect();
            let at = cuts[cut.index(cuts.len())];
            let mut end = ValueEnd::default();
            let (first, status) = end.feed(&text[..at]);
            prop_assert_eq!(at, first);
            let (more, status) = if status == Status::More { end.feed(&text[at..]) } else { (0, status) };
            prop_assert_eq!((written.len(), Status::Done), (first + more, status));
        }
    }

    #[test]
    fn brackets_must_match() {
        assert_eq!((2, Status::Broken), ValueEnd::default().feed("{1]"));
        assert_eq!((0, Status::Broken), ValueEnd::default().feed("}"));
        assert_eq!((0, Status::Broken), ValueEnd::default().feed(","));
    }
}
