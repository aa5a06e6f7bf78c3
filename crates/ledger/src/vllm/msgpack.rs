//! MessagePack read from a slice, field by field and without a tree: what a message claims to hold is compared with the
//! bytes it has before anything is allocated, and nothing recurses.

use rmp::{Marker, decode};

use super::Refusal;

/// What is left of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    fn peek(&self) -> Result<Marker, Refusal> {
        self.rest.first().map(|byte| Marker::from_u8(*byte)).ok_or(Refusal::Truncated)
    }

    fn bytes(&mut self, count: usize) -> Result<&'a [u8], Refusal> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(Refusal::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    /// A number of values, of which each has at least one byte.
    fn count(&self, claimed: u32) -> Result<usize, Refusal> {
        usize::try_from(claimed).ok().filter(|count| *count <= self.rest.len()).ok_or(Refusal::Truncated)
    }

    /// Takes the next value whole, whatever it is.
    pub(super) fn value(&mut self) -> Result<&'a [u8], Refusal> {
        let start = self.rest;
        let mut pending = 1usize;
        while pending > 0 {
            pending -= 1;
            pending += self.pass()?;
            if pending > self.rest.len() {
                return Err(Refusal::Truncated);
            }
        }
        Ok(&start[..start.len() - self.rest.len()])
    }

    /// Passes a value without the values in it, and returns their number.
    fn pass(&mut self) -> Result<usize, Refusal> {
        let marker = Marker::from_u8(self.bytes(1)?[0]);
        let (content, values) = match marker {
            Marker::FixPos(_) | Marker::FixNeg(_) | Marker::Null | Marker::True | Marker::False => (0, 0),
            Marker::U8 | Marker::I8 => (1, 0),
            Marker::U16 | Marker::I16 => (2, 0),
            Marker::U32 | Marker::I32 | Marker::F32 => (4, 0),
            Marker::U64 | Marker::I64 | Marker::F64 => (8, 0),
            Marker::FixStr(length) => (usize::from(length), 0),
            Marker::Str8 | Marker::Bin8 => (self.length(1)?, 0),
            Marker::Str16 | Marker::Bin16 => (self.length(2)?, 0),
            Marker::Str32 | Marker::Bin32 => (self.length(4)?, 0),
            // One byte more than the content: the type.
            Marker::Ext8 => (self.length(1)?.saturating_add(1), 0),
            Marker::Ext16 => (self.length(2)?.saturating_add(1), 0),
            Marker::Ext32 => (self.length(4)?.saturating_add(1), 0),
            Marker::FixExt1 => (2, 0),
            Marker::FixExt2 => (3, 0),
            Marker::FixExt4 => (5, 0),
            Marker::FixExt8 => (9, 0),
            Marker::FixExt16 => (17, 0),
            Marker::FixArray(values) => (0, usize::from(values)),
            Marker::Array16 => (0, self.length(2)?),
            Marker::Array32 => (0, self.length(4)?),
            Marker::FixMap(pairs) => (0, 2 * usize::from(pairs)),
            Marker::Map16 => (0, self.length(2)?.saturating_mul(2)),
            Marker::Map32 => (0, self.length(4)?.saturating_mul(2)),
            Marker::Reserved => return Err(Refusal::Truncated),
        };
        self.bytes(content)?;
        if values > self.rest.len() {
            return Err(Refusal::Truncated);
        }
        Ok(values)
    }

    fn length(&mut self, bytes: usize) -> Result<usize, Refusal> {
        Ok(self.bytes(bytes)?.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)))
    }

    /// The number of values of an array.
    pub(super) fn array(&mut self) -> Result<usize, Refusal> {
        let length = decode::read_array_len(&mut self.rest).map_err(|_| Refusal::WrongType)?;
        self.count(length)
    }

    /// The number of pairs of a map.
    pub(super) fn map(&mut self) -> Result<usize, Refusal> {
        let length = decode::read_map_len(&mut self.rest).map_err(|_| Refusal::WrongType)?;
        self.count(length)
    }

    pub(super) fn is_map(&self) -> bool {
        matches!(self.peek(), Ok(Marker::FixMap(_) | Marker::Map16 | Marker::Map32))
    }

    pub(super) fn is_array(&self) -> bool {
        matches!(self.peek(), Ok(Marker::FixArray(_) | Marker::Array16 | Marker::Array32))
    }

    pub(super) fn is_text(&self) -> bool {
        matches!(self.peek(), Ok(Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32))
    }

    pub(super) fn is_binary(&self) -> bool {
        matches!(self.peek(), Ok(Marker::Bin8 | Marker::Bin16 | Marker::Bin32))
    }

    /// Takes a nil, if there is one.
    pub(super) fn nil(&mut self) -> bool {
        let is_nil = matches!(self.peek(), Ok(Marker::Null));
        if is_nil {
            self.rest = &self.rest[1..];
        }
        is_nil
    }

    pub(super) fn text(&mut self) -> Result<&'a str, Refusal> {
        let length = decode::read_str_len(&mut self.rest).map_err(|_| Refusal::WrongType)?;
        let bytes = self.bytes(length as usize)?;
        std::str::from_utf8(bytes).map_err(|_| Refusal::WrongType)
    }

    pub(super) fn binary(&mut self) -> Result<&'a [u8], Refusal> {
        let length = decode::read_bin_len(&mut self.rest).map_err(|_| Refusal::WrongType)?;
        self.bytes(length as usize)
    }

    /// An integer that fits.
    pub(super) fn integer<T: TryFrom<u64>>(&mut self) -> Result<T, Refusal> {
        let value: u64 = decode::read_int(&mut self.rest).map_err(|_| Refusal::WrongType)?;
        T::try_from(value).map_err(|_| Refusal::WrongType)
    }

    pub(super) fn signed(&mut self) -> Result<i64, Refusal> {
        decode::read_int(&mut self.rest).map_err(|_| Refusal::WrongType)
    }

    pub(super) fn is_negative(&self) -> bool {
        match self.peek() {
            Ok(Marker::FixNeg(_)) => true,
            Ok(Marker::I8 | Marker::I16 | Marker::I32 | Marker::I64) => {
                self.rest.get(1).is_some_and(|byte| byte & 0x80 != 0)
            }
            _ => false,
        }
    }
}
