//! The losses of servers in the errors of this program: see [`fanout::recovery`].

use crate::engine::EngineError;
use crate::load::LoadError;
use fanout::device::Device;
use fanout::recovery::{Loss, RetryBudgets};
use std::error::Error;
use std::sync::Arc;
use thiserror::Error;

/// As [`Loss::find`], in the errors of this program.
pub fn find_loss(
    error: &anyhow::Error,
    devices: &[Arc<dyn Device>],
    retry_budgets: Option<&RetryBudgets>,
) -> Option<Loss> {
    Loss::find(error.chain().find_map(inner).unwrap_or(&**error), devices, retry_budgets)
}

/// The library's error in an error of this program that has the text and the sources of that error, and so hides it from the chain.
fn inner<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    match error.downcast_ref() {
        Some(EngineError::Sched(error)) => return Some(error),
        Some(EngineError::Read(error)) => return Some(error),
        _ => {}
    }
    match error.downcast_ref()? {
        LoadError::Weights(error) => Some(error),
        _ => None,
    }
}

/// A loss that ends the run, because `--retry` is not given.
#[derive(Debug, Error)]
#[error("{lost}; with --retry, the run reconnects, loads the lost weights again and continues")]
pub struct LostServer {
    lost: Loss,
    /// The error in which the loss was found, if its text does not name the loss.
    source: Option<anyhow::Error>,
}

impl LostServer {
    /// For the loss that was found in `error`.
    pub fn new(lost: Loss, error: anyhow::Error) -> LostServer {
        let named = error.chain().any(|cause| cause.to_string().contains(&lost.to_string()));
        LostServer { lost, source: (!named).then_some(error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanout::device::DeviceError;
    use fanout::sched::SchedError;
    use fanout::weights::WeightsError;

    fn gone() -> DeviceError {
        DeviceError::ConnectionLost { endpoint: "a:1".to_owned(), reason: "it is gone".to_owned() }
    }

    fn load(error: DeviceError) -> anyhow::Error {
        LoadError::from(WeightsError::Device { device: "a:1/0".to_owned(), error }).into()
    }

    #[test]
    fn a_lost_connection_is_found_in_every_error_that_hides_it() {
        let sched = EngineError::from(SchedError::Device { device: "a:1/0".to_owned(), error: gone() });
        let found = [
            gone().into(),
            load(gone()),
            load(gone()).context("loading"),
            sched.into(),
            EngineError::Read(gone()).into(),
        ];
        for error in found {
            let loss = find_loss(&error, &[], None);
            assert_eq!(loss.as_ref().map(Loss::endpoint), Some("a:1"), "{error:#}");
        }
        for error in [load(DeviceError::Ended), EngineError::NoTokens.into(), anyhow::anyhow!("no")] {
            assert_eq!(find_loss(&error, &[], None), None, "{error:#}");
        }
    }

    #[test]
    fn a_loss_without_retry_names_the_option_and_an_error_that_does_not_report_it() {
        let remedy = "a:1: connection lost: it is gone; with --retry, the run reconnects, loads the lost weights again and continues";
        let lost = || Loss::Server { endpoint: "a:1".to_owned(), reason: "it is gone".to_owned() };
        for (error, cause) in [(load(gone()), None), (load(DeviceError::Ended), Some(load(DeviceError::Ended)))] {
            let error = anyhow::Error::new(LostServer::new(lost(), error));
            let found: Vec<String> = error.chain().map(ToString::to_string).collect();
            assert_eq!(found[0], remedy);
            assert_eq!(found.get(1), cause.map(|cause| cause.to_string()).as_ref());
        }
    }
}
