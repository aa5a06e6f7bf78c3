//! `kvist.engine.v1.TokenIds`, the one message that is written by hand.
//!
//! A prompt is the longest thing that a router sends. The length of each message around it stands before the first id,
//! and a generated message walks all ids for each of these lengths, one branch an id. On the wire nothing differs.

use prost::{
    DecodeError, Message,
    bytes::{Buf, BufMut},
    encoding::{self, DecodeContext, WireType},
};

/// Token ids of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct TokenIds {
    /// In order.
    pub ids: Vec<u32>,
}

const IDS_TAG: u32 = 1;

/// Ids that are written together.
const PIECE_IDS: usize = 64;
/// Their bytes at most, and what the last of them writes beyond its own.
const PIECE_BYTES: usize = 5 * PIECE_IDS + 3;

/// Length of an id as a varint.
fn varint_bytes(id: u32) -> u32 {
    1 + u32::from(id >> 7 != 0) + u32::from(id >> 14 != 0) + u32::from(id >> 21 != 0) + u32::from(id >> 28 != 0)
}

/// An id below 2^21, as all of a vocabulary are, as a varint in the first bytes of four.
fn short_varint(id: u32) -> ([u8; 4], usize) {
    let groups = id & 0x7f | (id & 0x7f << 7) << 1 | (id & 0x7f << 14) << 2;
    let (has_second, has_third) = (u32::from(id >> 7 != 0), u32::from(id >> 14 != 0));
    ((groups | has_second << 7 | has_third << 15).to_le_bytes(), (1 + has_second + has_third) as usize)
}

/// An id as a varint, in the first bytes of eight.
fn varint(id: u32) -> ([u8; 8], usize) {
    let id_bits = u64::from(id);
    let groups = id_bits & 0x7f
        | (id_bits & 0x7f << 7) << 1
        | (id_bits & 0x7f << 14) << 2
        | (id_bits & 0x7f << 21) << 3
        | (id_bits & 0x7f << 28) << 4;
    let bytes = varint_bytes(id);
    // Every byte but the last says that one follows.
    let follows = 0x80_8080_8080 & ((1 << (8 * (bytes - 1))) - 1);
    ((groups | follows).to_le_bytes(), bytes as usize)
}

/// Writes ids one behind the other, as one of the functions above does, and returns where they end.
fn pack<const BYTES: usize>(
    ids: &[u32],
    piece: &mut [u8; PIECE_BYTES],
    varint: impl Fn(u32) -> ([u8; BYTES], usize),
) -> usize {
    let mut end = 0;
    for id in ids {
        let (bytes, length) = varint(*id);
        piece[end..end + BYTES].copy_from_slice(&bytes);
        end += length;
    }
    end
}

impl TokenIds {
    fn packed_bytes(&self) -> usize {
        // Sums without branches, several ids at once, and short enough for 32 bits.
        self.ids.chunks(1 << 20).map(|ids| ids.iter().map(|id| varint_bytes(*id)).sum::<u32>() as usize).sum()
    }
}

impl Message for TokenIds {
    fn encode_raw(&self, buffer: &mut impl BufMut) {
        if self.ids.is_empty() {
            return;
        }
        encoding::encode_key(IDS_TAG, WireType::LengthDelimited, buffer);
        encoding::encode_varint(self.packed_bytes() as u64, buffer);
        let mut piece = [0; PIECE_BYTES];
        for ids in self.ids.chunks(PIECE_IDS) {
            let are_short = ids.iter().fold(0, |all, id| all | id) >> 21 == 0;
            let end = if are_short { pack(ids, &mut piece, short_varint) } else { pack(ids, &mut piece, varint) };
            buffer.put_slice(&piece[..end]);
        }
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buffer: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        match tag {
            IDS_TAG => encoding::uint32::merge_repeated(wire_type, &mut self.ids, buffer, context),
            _ => encoding::skip_field(wire_type, tag, buffer, context),
        }
    }

    fn encoded_len(&self) -> usize {
        if self.ids.is_empty() {
            return 0;
        }
        let bytes = self.packed_bytes();
        encoding::key_len(IDS_TAG) + encoding::encoded_len_varint(bytes as u64) + bytes
    }

    fn clear(&mut self) {
        self.ids.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Ids of every length.
    fn ids() -> impl Strategy<Value = Vec<u32>> {
        let id = |least: u32| (any::<u32>(), least..32).prop_map(|(id, shift)| id >> shift);
        prop_oneof![prop::collection::vec(id(0), 0..300), prop::collection::vec(id(11), 0..300)]
    }

    proptest! {
        #[test]
        fn the_bytes_are_those_that_are_generated(ids in ids()) {
            let mut generated = Vec::new();
            encoding::uint32::encode_packed(IDS_TAG, &ids, &mut generated);
            let written = TokenIds { ids }.encode_to_vec();
            prop_assert_eq!(&generated, &written);
        }

        #[test]
        fn what_was_written_is_read(ids in ids(), more in ids()) {
            let (first, second) = (TokenIds { ids: ids.clone() }, TokenIds { ids: more.clone() });
            prop_assert_eq!(first.encode_to_vec().len(), first.encoded_len());
            prop_assert_eq!(&first, &TokenIds::decode(first.encode_to_vec().as_slice()).unwrap());
            // Two of the same field go on one behind the other, and unpacked ids are read as well.
            let mut bytes = first.encode_to_vec();
            encoding::uint32::encode_repeated(IDS_TAG, &more, &mut bytes);
            bytes.extend(second.encode_to_vec());
            prop_assert_eq!([ids, more.clone(), more].concat(), TokenIds::decode(bytes.as_slice()).unwrap().ids);
        }
    }
}
