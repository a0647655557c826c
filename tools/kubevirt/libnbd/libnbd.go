// Package libnbd is an empty stand-in: only virt-launcher imports the real one.
package libnbd
