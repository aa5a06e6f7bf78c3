//! Who is on the other side of a connection.

use crate::PeerRole;

/// Who is on the other side, as the door knows it. Travels with each request of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// The door asks for no certificates, so nobody is told apart.
    Unasked,
    /// The door asks, and the peer has shown none.
    Anonymous,
    /// The peer has shown a certificate of an accepted authority, and this is the role in it, if one is.
    Certified(Option<PeerRole>),
}
