//! What is wrong with a certificate, in words: whose it is, and which clock says so.

use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError};
use thiserror::Error;

/// Names of a certificate that an error lists at most.
const MAX_NAMES: usize = 4;

/// Why a certificate is not accepted.
#[derive(Debug, Error)]
pub(crate) enum CertificateFault {
    #[error("the peer's certificate expired on {not_after}, and this machine's clock says {now}")]
    Expired { not_after: String, now: String },
    #[error("the peer's certificate is not valid before {not_before}, and this machine's clock says {now}")]
    NotYetValid { not_before: String, now: String },
    #[error("the peer's certificate is not signed by the CA (--ca)")]
    OtherAuthority,
    #[error("the server's certificate is not for {expected}, but for {presented}")]
    OtherName { expected: String, presented: String },
    #[error("the peer's certificate cannot be used: {0}")]
    Other(CertificateError),
    #[error(
        "the peer does not accept this end's certificate: by the peer's clock it has expired or is not valid yet; this \
         machine's clock says {now}"
    )]
    ClockOfPeer { now: String },
    #[error("the peer does not know the CA of this end's certificate (its --ca)")]
    AuthorityUnknownToPeer,
    #[error(
        "the peer does not accept this end's certificate: it may be for another name than the one that was dialled"
    )]
    NameUnknownToPeer,
    #[error("the peer demands a certificate of its CA (--cert, --ca), and this end has none")]
    Demanded,
}

impl CertificateFault {
    /// The fault that this end has found.
    pub(super) fn found(e: CertificateError) -> CertificateFault {
        use CertificateError::{
            ExpiredContext, NotValidForName, NotValidForNameContext, NotValidYetContext, UnknownIssuer,
        };
        match e {
            ExpiredContext { time, not_after } => {
                CertificateFault::Expired { not_after: utc(not_after), now: utc(time) }
            }
            NotValidYetContext { time, not_before } => {
                CertificateFault::NotYetValid { not_before: utc(not_before), now: utc(time) }
            }
            NotValidForNameContext { expected, mut presented } => {
                presented.truncate(MAX_NAMES);
                let presented = presented.join(", ");
                let expected = expected.to_str().into_owned();
                CertificateFault::OtherName { expected, presented }
            }
            NotValidForName => {
                CertificateFault::OtherName { expected: "this host".to_owned(), presented: "another".to_owned() }
            }
            UnknownIssuer => CertificateFault::OtherAuthority,
            other => CertificateFault::Other(other),
        }
    }

    /// The fault that the peer has found, by its alert.
    pub(super) fn reported(alert: AlertDescription) -> Option<CertificateFault> {
        match alert {
            AlertDescription::CertificateExpired => Some(CertificateFault::ClockOfPeer { now: utc(UnixTime::now()) }),
            AlertDescription::UnknownCA => Some(CertificateFault::AuthorityUnknownToPeer),
            AlertDescription::BadCertificate => Some(CertificateFault::NameUnknownToPeer),
            AlertDescription::CertificateRequired => Some(CertificateFault::Demanded),
            _ => None,
        }
    }

    /// A text about a server that was dialled, which quotes nothing of its certificate.
    pub(crate) fn without_quotes(&self) -> &'static str {
        match self {
            CertificateFault::Expired { .. } | CertificateFault::NotYetValid { .. } => {
                "its certificate is not valid now, by the clock of the server that dials it, whose log has the times"
            }
            CertificateFault::OtherAuthority => "its certificate is not signed by the CA of the server that dials it",
            CertificateFault::OtherName { .. } => "its certificate is for another name",
            CertificateFault::Other(_) => "its certificate cannot be used",
            CertificateFault::ClockOfPeer { .. } => {
                "it does not accept this server's certificate: by its clock, that has expired or is not valid yet"
            }
            CertificateFault::AuthorityUnknownToPeer => "it does not know the CA of this server's certificate",
            CertificateFault::NameUnknownToPeer | CertificateFault::Demanded => {
                "it does not accept this server's certificate"
            }
        }
    }
}

/// A time in UTC, to the minute, in the Gregorian calendar.
fn utc(time: UnixTime) -> String {
    let (days, seconds) = (time.as_secs() / 86_400, time.as_secs() % 86_400);
    // From 0000-03-01, so that the leap day is the last one of a year; the calendar repeats after 400 years.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153; // 0: March
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + next;
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", seconds / 3600, seconds % 3600 / 60)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_dates() {
        for (seconds, want) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_583_020_800, "2020-03-01 00:00 UTC"),
            (1_795_705_445, "2026-11-26 15:04 UTC"),
            (4_107_542_399, "2100-02-28 23:59 UTC"),
            (253_402_300_799, "9999-12-31 23:59 UTC"),
        ] {
            assert_eq!(utc(UnixTime::since_unix_epoch(Duration::from_secs(seconds))), want);
        }
    }
}
