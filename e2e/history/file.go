package history

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// file appends lines from one goroutine; whoever records only sends. A line is on disk after a second at the latest.
type file struct {
	lines chan line
	flush chan chan error
	done  chan struct{}
	err   error // valid after done

	mu     sync.RWMutex
	closed bool
}

func create(ctx context.Context, path string, h Header) (*file, error) {
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) // it holds Helm's Secrets
	if err != nil {
		return nil, fmt.Errorf("create the history: %w", err)
	}
	f := &file{lines: make(chan line, 1024), flush: make(chan chan error), done: make(chan struct{})}
	go f.run(ctx, out)
	f.add(line{Header: &h})
	return f, nil
}

func (f *file) run(ctx context.Context, out *os.File) {
	defer close(f.done)
	w := bufio.NewWriterSize(out, 1<<16)
	enc := json.NewEncoder(w)
	keep := func(err error) {
		if f.err == nil && err != nil {
			f.err = fmt.Errorf("write the history: %w", err)
		}
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	ended := ctx.Done()
	for {
		select {
		case l, open := <-f.lines:
			if !open {
				keep(w.Flush())
				keep(out.Close())
				return
			}
			keep(enc.Encode(l))
		case reply := <-f.flush:
			for n := len(f.lines); n > 0; n-- {
				keep(enc.Encode(<-f.lines))
			}
			keep(w.Flush())
			reply <- f.err
		case <-tick.C:
			keep(w.Flush())
		case <-ended:
			ended = nil
			keep(w.Flush())
		}
	}
}

// add records a line. What comes after close is dropped: the history has ended.
func (f *file) add(l line) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if !f.closed {
		f.lines <- l
	}
}

// sync writes out what was added before it.
func (f *file) sync() error {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.closed {
		return errors.New("write the history: the recorder was stopped")
	}
	reply := make(chan error, 1)
	f.flush <- reply
	return <-reply
}

func (f *file) close() error {
	f.mu.Lock()
	f.closed = true
	close(f.lines)
	f.mu.Unlock()
	<-f.done
	return f.err
}
