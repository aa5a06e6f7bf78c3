//! Who is on the other side of a connection.

use std::net::IpAddr;

use crate::PeerRole;

/// Who is on the other side, as the door knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// The door asks for no certificates, so nobody is told apart.
    Unasked,
    /// The door asks, and the peer has shown none.
    Anonymous,
    /// The peer has shown a certificate of an accepted authority, and this is the role in it, if one is.
    Certified(Option<PeerRole>),
}

/// What is known of a connection. Travels with each request that comes over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Who is on the other side.
    pub peer: Peer,
    /// Where that is; none when the connection has ended before anybody looked.
    pub host: Option<IpAddr>,
}
