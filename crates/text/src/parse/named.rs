//! An answer that is the arguments of one tool, because a schema says so.

use super::{
    json::{Status, ValueEnd},
    marks::Machine,
    piece::Pieces,
};

#[derive(Debug)]
enum State {
    Begin,
    Arguments(ValueEnd),
    Behind,
    Text,
}

/// Reads the arguments of a tool whose name is known.
#[derive(Debug)]
pub(crate) struct NamedArguments {
    name: String,
    state: State,
}

impl NamedArguments {
    pub(crate) fn new(name: String) -> Self {
        Self { name, state: State::Begin }
    }
}

impl Machine for NamedArguments {
    fn step(&mut self, rest: &str, out: &mut Pieces) -> Option<usize> {
        let first = rest.chars().next()?;
        match &mut self.state {
            State::Begin | State::Behind if first.is_whitespace() => Some(first.len_utf8()),
            State::Begin if first == '{' => {
                out.call(&self.name);
                self.state = State::Arguments(ValueEnd::default());
                Some(0)
            }
            // An engine that did not keep to the schema.
            State::Begin | State::Behind => {
                out.failed();
                self.state = State::Text;
                Some(0)
            }
            State::Arguments(value) => {
                let (taken, status) = value.feed(rest);
                out.arguments(&rest[..taken]);
                match status {
                    Status::More => {}
                    Status::Done => {
                        out.call_end();
                        self.state = State::Behind;
                    }
                    Status::Broken => {
                        out.failed();
                        self.state = State::Text;
                    }
                }
                Some(taken)
            }
            State::Text => {
                out.text(rest);
                Some(rest.len())
            }
        }
    }

    fn finish(&mut self, _rest: &str, _out: &mut Pieces) {}
}
