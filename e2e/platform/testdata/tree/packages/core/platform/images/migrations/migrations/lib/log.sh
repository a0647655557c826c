log() { echo "$(basename "$0"): $*"; }
